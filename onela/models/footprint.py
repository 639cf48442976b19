"""What a model takes of a memory beside the state: its weights, and the activations of a row."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from onela.models.causal_lm import CausalLM
from onela.models.config import LINEAR, ModelConfig
from onela.models.layers import FusedLinear
from onela.models.registry import read_family
from onela.models.weights import FP32_SUFFIXES


def weight_bytes(
    path: str | Path, dtype: torch.dtype, *, num_head_rows: int = 0, quantization: str = "none"
) -> int:
    """Bytes of a checkpoint's weights once they are loaded; its files may be absent, `config.json` suffices.

    Args:
        path: the checkpoint's directory. dtype: that the weights are kept in.
        num_head_rows: rows of the head that are copied for the SID levels.
        quantization: "none" or "fp8", as `load_model` takes it.
    Raises:
        CheckpointError, ConfigError: as `read_model_config`.
    """
    family, config = read_family(path)
    with torch.device("meta"):
        model = family(config)
    return module_bytes(model, dtype, quantization) + num_head_rows * config.hidden_size * dtype.itemsize


def module_bytes(model: CausalLM, dtype: torch.dtype, quantization: str = "none") -> int:
    """Bytes of the parameters of a model that is not quantized yet; a tied head counts once."""
    whole = sum(
        parameter.numel() * (4 if name.endswith(FP32_SUFFIXES) else dtype.itemsize)
        for name, parameter in model.named_parameters()
    )
    if quantization == "none":
        return whole
    weights = [
        part.weight
        for module in model.modules()
        if isinstance(module, FusedLinear)
        for name, part in module.named_children()
        if isinstance(part, nn.Linear) and name not in module.kept_wide
    ]
    # One byte a number, and one fp32 scale a row.
    return whole + sum(w.numel() * (1 - dtype.itemsize) + 4 * w.shape[0] for w in weights)


def row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Activations of one row (a beam or a prompt token) at the peak of a forward, as an estimate from above.

    What lies beside each other in the widest part of a layer: the residual stream (fp32 in decode), what is added to
    it and its norm, and the inputs and outputs of the mixer or of the MLP; of a mixture as many as a token visits
    experts.
    """
    experts = config.moe.num_experts_per_token + 1 if config.moe else 1
    intermediate = max(
        config.intermediate_size,
        0 if config.moe is None else config.moe.intermediate_size,
        0 if config.moe is None else config.moe.shared_intermediate_size,
    )
    widest = experts * (3 * intermediate + config.hidden_size)
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    widest = max(widest, 5 * q + 4 * kv)
    if LINEAR in config.layer_types:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        # The projection, the convolved rows, and the recurrence's rows in fp32.
        widest = max(widest, (2 * keys + 2 * values) + (2 * keys + values) + 4 * values)
    residual = config.hidden_size * torch.float32.itemsize
    return residual + (2 * config.hidden_size + widest) * dtype.itemsize
