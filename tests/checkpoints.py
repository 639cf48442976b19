"""Tiny checkpoints with random weights, saved by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

NO_SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def qwen3_5_config(**overrides: Any) -> Qwen3_5TextConfig:
    """A hybrid with grouped value heads and value heads wider than key heads."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **NO_SPECIAL_TOKENS,
    }
    return Qwen3_5TextConfig(**{**values, **overrides})


def qwen3_config(**overrides: Any) -> Qwen3Config:
    """A dense model with grouped key heads, whose head size is not hidden_size / heads."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        **NO_SPECIAL_TOKENS,
    }
    return Qwen3Config(**{**values, **overrides})


MIXTURE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}


def qwen3_next_config(**overrides: Any) -> Qwen3NextConfig:
    """The hybrid of `qwen3_5_config` with a mixture of experts in every layer."""
    values = qwen3_5_config().to_dict()
    values = {name: value for name, value in values.items() if hasattr(Qwen3NextConfig(), name)}
    return Qwen3NextConfig(**{**values, "model_type": "qwen3_next", **MIXTURE, **overrides})


def qwen3_5_moe_config(**overrides: Any) -> Qwen3_5MoeTextConfig:
    """The hybrid of `qwen3_5_config` with a mixture of experts in every layer."""
    values = qwen3_5_config().to_dict()
    values = {name: value for name, value in values.items() if hasattr(Qwen3_5MoeTextConfig(), name)}
    return Qwen3_5MoeTextConfig(**{**values, "model_type": "qwen3_5_moe_text", **MIXTURE, **overrides})


def randomize(model: torch.nn.Module, seed: int = 0, gain: float = 2.0) -> torch.nn.Module:
    """Give every parameter a value that matters: norms and gates off their initial points, logits spread out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(0.5 * noise)
            elif "norm" in name:
                parameter.add_(0.2 * noise)
            elif "conv1d" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (gain / parameter.shape[-1] ** 0.5))
    return model


def save(
    model: PreTrainedModel, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 2.0
) -> Any:
    """Randomize a model, save it as transformers does, and return it."""
    model = randomize(model, seed, gain).to(dtype).eval()
    model.save_pretrained(path)
    return model


def save_qwen3_5(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 2.0, **overrides: Any
) -> Qwen3_5ForCausalLM:
    """Save a tiny Qwen3.5 text model and return it. Weights of a smaller `gain` spread rounding less."""
    return save(Qwen3_5ForCausalLM(qwen3_5_config(**overrides)), path, seed, dtype, gain)


def save_qwen3(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 2.0, **overrides: Any
) -> Qwen3ForCausalLM:
    """Save a tiny dense Qwen3 model and return it."""
    return save(Qwen3ForCausalLM(qwen3_config(**overrides)), path, seed, dtype, gain)


def save_qwen3_next(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 2.0, **overrides: Any
) -> Qwen3NextForCausalLM:
    """Save a tiny Qwen3-Next model and return it."""
    return save(Qwen3NextForCausalLM(qwen3_next_config(**overrides)), path, seed, dtype, gain)


def save_qwen3_5_moe(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 2.0, **overrides: Any
) -> Qwen3_5MoeForCausalLM:
    """Save a tiny Qwen3.5-MoE text model and return it."""
    return save(Qwen3_5MoeForCausalLM(qwen3_5_moe_config(**overrides)), path, seed, dtype, gain)
