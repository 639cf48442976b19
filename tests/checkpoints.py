"""Tiny checkpoints with random weights, saved by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig


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
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen3_5TextConfig(**{**values, **overrides})


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
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
                parameter.copy_(noise * (2.0 / parameter.shape[-1] ** 0.5))
    return model


def save_qwen3_5(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Qwen3_5ForCausalLM:
    """Save a tiny Qwen3.5 text model and return it."""
    config = qwen3_5_config(**overrides)
    model = randomize(Qwen3_5ForCausalLM(config), seed).to(dtype).eval()
    model.save_pretrained(path)
    return model
