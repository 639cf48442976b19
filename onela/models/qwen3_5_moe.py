"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onela.models.config import ConfigReader, ModelConfig
from onela.models.moe import SparseMLP, expert_pieces, read_experts
from onela.models.qwen3_5 import DEFAULTS as DENSE_DEFAULTS
from onela.models.qwen3_5 import Qwen3_5, hybrid_config, text_values

# The values that transformers' Qwen3_5MoeTextConfig gives to fields a saved configuration may leave out.
DEFAULTS: dict[str, Any] = {
    **DENSE_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    # No layer has a dense MLP, and the configuration no field for its size.
    "intermediate_size": 0,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


class Qwen3_5Moe(Qwen3_5):  # noqa: N801 - the family's own name
    """The text model of Qwen3.5-MoE (`qwen3_5_moe_text`, and `qwen3_5_moe` with its vision part left out)."""

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> ModelConfig:
        values = text_values(values)
        reader = ConfigReader(values, DEFAULTS)
        layers = frozenset(range(reader.integer("num_hidden_layers")))
        moe = read_experts(reader, layers, normalize_weights=True)
        return hybrid_config(values, DEFAULTS, "qwen3_5_moe_text", moe=moe)

    @classmethod
    def pieces(cls, config: ModelConfig) -> Mapping[str, Sequence[str]]:
        assert config.moe is not None, "read_config always gives a mixture"
        return dict(expert_pieces(sorted(config.moe.sparse_layers), config.moe.num_experts))

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        return SparseMLP(config)
