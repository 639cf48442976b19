"""Qwen3.5: Gated DeltaNet and gated softmax attention, from a text checkpoint or a vision-language one."""

from __future__ import annotations

from typing import Any

from onela.models.causal_lm import CausalLM
from onela.models.config import ConfigReader, ModelConfig, MoeConfig

# The values that transformers' Qwen3_5TextConfig gives to fields a saved configuration may leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
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
}
IGNORED = ("mtp.", "model.visual.", "visual.")


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a configuration, whichever way it is wrapped."""
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        return values
    merged = dict(inner)
    # The wrapper decides about tying when the text part says nothing.
    if "tie_word_embeddings" not in merged and "tie_word_embeddings" in values:
        merged["tie_word_embeddings"] = values["tie_word_embeddings"]
    return merged


def hybrid_config(
    values: dict[str, Any], defaults: dict[str, Any], model_type: str, *, moe: MoeConfig | None = None
) -> ModelConfig:
    """The fields that all hybrids with Gated DeltaNet and gated attention share."""
    reader = ConfigReader(values, defaults)
    reader.expect("hidden_act", "silu")
    reader.expect("attn_output_gate", True)
    reader.expect("output_gate_type", "swish", "silu")
    head_dim = reader.integer("head_dim")
    theta, rotary_dim = reader.rope(head_dim)
    return ModelConfig(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size", minimum=0 if moe else 1),
        layer_types=reader.layer_types(),
        num_attention_heads=reader.integer("num_attention_heads"),
        num_key_value_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        attention_bias=reader.flag("attention_bias"),
        linear_num_key_heads=reader.integer("linear_num_key_heads"),
        linear_num_value_heads=reader.integer("linear_num_value_heads"),
        linear_key_head_dim=reader.integer("linear_key_head_dim"),
        linear_value_head_dim=reader.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=reader.integer("linear_conv_kernel_dim", minimum=2),
        moe=moe,
    )


class Qwen3_5(CausalLM):  # noqa: N801 - the family's own name
    """The text model of Qwen3.5 (`qwen3_5_text`, and `qwen3_5` with its vision part left out)."""

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> ModelConfig:
        return hybrid_config(text_values(values), DEFAULTS, "qwen3_5_text")

    @classmethod
    def rename(cls, name: str) -> str | None:
        if name.startswith(IGNORED):
            return None
        return name.replace("model.language_model.", "model.", 1)
