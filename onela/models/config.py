"""A model's sizes, read from `config.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onela.errors import CheckpointError, ConfigError
from onela.state.geometry import AttentionGeometry, GatedDeltaGeometry, LayerGeometry

LINEAR = "linear_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of a mixture-of-experts MLP.

    Attributes:
        num_experts: E, routed experts. num_experts_per_token: experts that a token visits.
        intermediate_size: of a routed expert. shared_intermediate_size: of the shared expert, 0 for none.
        normalize_weights: whether the weights of a token's experts are scaled to sum to one.
        sparse_layers: indices of the layers whose MLP is a mixture.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder, whatever its family. Field names are those of Hugging Face's `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    attention_bias: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        for layer_type in self.layer_types:
            if layer_type not in (LINEAR, FULL):
                raise ConfigError(f"layer_types: {layer_type!r} is neither {LINEAR!r} nor {FULL!r}")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads: {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if LINEAR in self.layer_types and (
            self.linear_num_key_heads < 1 or self.linear_num_value_heads % self.linear_num_key_heads
        ):
            raise ConfigError(
                f"linear_num_value_heads: {self.linear_num_value_heads} is no multiple of "
                f"linear_num_key_heads = {self.linear_num_key_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"rotary_dim: {self.rotary_dim} is not even and within head_dim = {self.head_dim}"
            )

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """What the state must know of each layer."""
        linear = GatedDeltaGeometry(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel_size=self.linear_conv_kernel_dim,
        )
        full = AttentionGeometry(num_kv_heads=self.num_key_value_heads, head_dim=self.head_dim)
        return tuple(linear if layer_type == LINEAR else full for layer_type in self.layer_types)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `CheckpointError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value


class ConfigReader:
    """Typed access to the fields of a `config.json`, with errors that name the field.

    Args:
        values: the parsed JSON.
        defaults: values of fields that a saved configuration may leave out.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = values
        self.defaults = defaults

    def get(self, field: str) -> Any:
        """The value of a field, or its default. Raises `ConfigError` when there is neither."""
        if self.values.get(field) is not None:
            return self.values[field]
        if field in self.defaults:
            return self.defaults[field]
        raise ConfigError(f"config.json: {field} is missing")

    def integer(self, field: str, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"config.json: {field} must be a whole number >= {minimum}, got {value!r}")
        return value

    def number(self, field: str) -> float:
        """A finite number."""
        value = self.get(field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:  # NaN is not either
            raise ConfigError(f"config.json: {field} must be a number, got {value!r}")
        return float(value)

    def flag(self, field: str) -> bool:
        """true or false."""
        value = self.get(field)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {field} must be true or false, got {value!r}")
        return value

    def expect(self, field: str, *allowed: Any) -> None:
        """Refuse a field whose value changes the mathematics in a way that is not implemented."""
        value = self.get(field)
        if value not in allowed:
            raise ConfigError(
                f"config.json: {field} = {value!r} is not supported, only {', '.join(map(repr, allowed))}"
            )

    def rope(self, head_dim: int) -> tuple[float, int]:
        """Base and rotated dimensions of the rotary embedding, from the new spelling or the old one."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"config.json: rope_parameters must be an object, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise ConfigError(f"config.json: rope_type = {kind!r} is not supported, only 'default'")
        # What stands in the object goes before what stands beside it.
        inner = {name: value for name, value in rope.items() if value is not None}
        reader = ConfigReader({**self.values, **inner}, self.defaults)
        theta = reader.number("rope_theta")
        if theta <= 0:
            raise ConfigError(f"config.json: rope_theta must be above 0, got {theta!r}")
        return theta, int(head_dim * reader.number("partial_rotary_factor"))

    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer: listed, or one full-attention layer in every `full_attention_interval`."""
        count = self.integer("num_hidden_layers")
        listed = self.values.get("layer_types")
        if listed is None:
            interval = self.integer("full_attention_interval")
            return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
        if not isinstance(listed, (list, tuple)):
            raise ConfigError(f"config.json: layer_types must be a list, got {listed!r}")
        if len(listed) != count:
            raise ConfigError(
                f"config.json: layer_types names {len(listed)} layers, num_hidden_layers is {count}"
            )
        return tuple(listed)
