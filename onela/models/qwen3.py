"""Qwen3, dense: softmax attention in every layer. OpenOneRec, OneRec-Think and MiniOneRec are models of this family."""

from __future__ import annotations

from typing import Any

from onela.errors import ConfigError
from onela.models.causal_lm import CausalLM
from onela.models.config import FULL, ConfigReader, ModelConfig

# The values that transformers' Qwen3Config gives to fields a saved configuration may leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


class Qwen3(CausalLM):
    """Dense Qwen3 (`qwen3`)."""

    zero_centered_norms = False
    gated_attention = False

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> ModelConfig:
        reader = ConfigReader(values, DEFAULTS)
        reader.expect("hidden_act", "silu")
        num_layers = reader.integer("num_hidden_layers")
        _refuse_windows(reader, num_layers)
        head_dim = reader.integer("head_dim")
        theta, rotary_dim = reader.rope(head_dim)
        num_heads = reader.integer("num_attention_heads")
        # As in transformers: left out it is 32, null it is one per query head.
        ungrouped = "num_key_value_heads" in values and values["num_key_value_heads"] is None
        return ModelConfig(
            model_type="qwen3",
            vocab_size=reader.integer("vocab_size"),
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            layer_types=(FULL,) * num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads if ungrouped else reader.integer("num_key_value_heads"),
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope_theta=theta,
            rotary_dim=rotary_dim,
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            attention_bias=reader.flag("attention_bias"),
        )


def _refuse_windows(reader: ConfigReader, num_layers: int) -> None:
    """Raise `ConfigError` when any layer looks back only so far. A window that is named but off does not matter."""
    if reader.values.get("layer_types") is not None:
        for layer_type in reader.layer_types():
            if layer_type != FULL:
                raise ConfigError(
                    f"config.json: layer_types: {layer_type!r} is not supported in a qwen3 model, only {FULL!r}"
                )
        return
    window = reader.values.get("sliding_window")
    if (
        reader.flag("use_sliding_window")
        and window is not None
        and reader.integer("max_window_layers", 0) < num_layers
    ):
        raise ConfigError(
            f"config.json: use_sliding_window with sliding_window = {window!r} is not supported, only full attention"
        )
