"""Qwen3-Next: Qwen3.5's mixers with grouped projections, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onela.errors import ConfigError
from onela.models.causal_lm import CausalLM
from onela.models.config import LINEAR, ConfigReader, ModelConfig, MoeConfig
from onela.models.layers import MLP, Attention, GatedDeltaNet
from onela.models.moe import SparseMLP, expert_pieces, read_experts
from onela.models.quantized import Rows
from onela.models.qwen3_5 import hybrid_config

# The values that transformers' Qwen3NextConfig gives to fields a saved configuration may leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": (),
}


class GroupedGatedDeltaNet(GatedDeltaNet):
    """The mixer with its six projections in two tensors, by key head: `[q | k | v | z]` and `[b | a]` of each head."""

    def _make_projections(self, config: ModelConfig, conv_dim: int) -> None:
        self.in_proj_qkvz = nn.Linear(config.hidden_size, conv_dim + self.HV * self.V, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * self.HV, bias=False)

    def project(self, x: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = self.split_linear(x, [self.in_proj_qkvz, self.in_proj_ba])
        if self.fused is None:
            parts = [part[:, rows.to(part.device)] for part, rows in zip(parts, self._rows())]
        mixed, z = parts[0].split([parts[0].shape[-1] - self.HV * self.V, self.HV * self.V], dim=-1)
        b, a = parts[1].chunk(2, dim=-1)
        return mixed, z, b, a

    def fuse(self) -> None:
        """From here on the rows of both projections stand kind by kind, as the convolution and the gates want them."""
        parts = [self.in_proj_qkvz, self.in_proj_ba]
        for part, rows in zip(parts, self._rows()):
            part.weight = nn.Parameter(part.weight.data[rows.to(part.weight.device)], requires_grad=False)
        self.fuse_linear(parts)

    def _rows(self) -> list[Tensor]:
        """For each projection, which row of the checkpoint's goes where in `[q | k | v | z]` and `[b | a]`."""
        r = self.HV // self.H
        return [
            _ungroup(self.H, [self.K, self.K, r * self.V, r * self.V]),
            _ungroup(self.H, [r, r]),
        ]


def _ungroup(num_groups: int, sizes: list[int]) -> Tensor:
    """Order that turns `num_groups` runs of all kinds into one run per kind; `sizes` are the kinds' rows in a group."""
    rows = torch.arange(num_groups * sum(sizes)).view(num_groups, sum(sizes))
    return torch.cat([kind.flatten() for kind in rows.split(sizes, dim=1)])


class Qwen3Next(CausalLM):
    """Qwen3-Next (`qwen3_next`)."""

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> ModelConfig:
        reader = ConfigReader(values, DEFAULTS)
        return hybrid_config(values, DEFAULTS, "qwen3_next", moe=_read_moe(reader))

    @classmethod
    def rename(cls, name: str) -> str | None:
        return None if name.startswith("mtp.") else name

    @classmethod
    def pieces(cls, config: ModelConfig) -> Mapping[str, Sequence[str]]:
        moe = config.moe
        return {} if moe is None else dict(expert_pieces(sorted(moe.sparse_layers), moe.num_experts))

    def make_mixer(self, config: ModelConfig, layer: int) -> tuple[str, nn.Module]:
        if config.layer_types[layer] == LINEAR:
            return "linear_attn", GroupedGatedDeltaNet(config, layer)
        return "self_attn", Attention(config, layer, gated=self.gated_attention)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        if config.moe is not None and layer in config.moe.sparse_layers:
            return SparseMLP(config)
        return MLP(config.hidden_size, config.intermediate_size)


def _read_moe(reader: ConfigReader) -> MoeConfig | None:
    """Which layers are mixtures, and their sizes; None when all are dense."""
    num_layers = reader.integer("num_hidden_layers")
    num_experts = reader.integer("num_experts", minimum=0)
    step = reader.integer("decoder_sparse_step")
    dense = reader.get("mlp_only_layers")
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layer numbers, got {dense!r}")
    sparse = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if num_experts == 0 or not sparse:
        return None
    return read_experts(reader, sparse, normalize_weights=reader.flag("norm_topk_prob"))
