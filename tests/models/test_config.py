"""Reading `config.json`: both spellings of every field, and errors that name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onela.errors import CheckpointError, ConfigError
from onela.models.config import FULL, LINEAR, ConfigReader, ModelConfig, read_json
from onela.state import AttentionGeometry, GatedDeltaGeometry

VALUES: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_types": (LINEAR, FULL),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


def test_geometry() -> None:
    linear, full = ModelConfig(**VALUES).geometry
    assert isinstance(linear, GatedDeltaGeometry)
    assert (linear.conv_dim, linear.state_numel) == (2 * 2 * 8 + 6 * 12, 6 * 12 * 8)
    assert full == AttentionGeometry(num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ("mamba",)}, "layer_types: 'mamba' is neither"),
        ({"num_key_value_heads": 3}, "num_attention_heads: 4 is no multiple of num_key_value_heads = 3"),
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads: 5 is no multiple of linear_num_key_heads = 2",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_value_heads: 6 is no multiple of linear_num_key_heads = 0"),
        ({"rotary_dim": 7}, "rotary_dim: 7 is not even"),
        ({"rotary_dim": 0}, "rotary_dim: 0 is not even and within head_dim = 16"),
        ({"rotary_dim": 18}, "rotary_dim: 18 is not even and within head_dim = 16"),
    ],
)
def test_sizes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**VALUES, **change})


def test_linear_heads_do_not_matter_without_linear_layers() -> None:
    ModelConfig(**{**VALUES, "layer_types": (FULL,), "linear_num_key_heads": 0})


class TestReader:
    def test_defaults_and_null(self) -> None:
        reader = ConfigReader({"a": None, "b": 3}, {"a": 5, "c": 7})
        assert (reader.integer("a"), reader.integer("b"), reader.integer("c")) == (5, 3, 7)
        with pytest.raises(ConfigError, match="d is missing"):
            reader.integer("d")

    @pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
    def test_an_integer(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="heads must be a whole number >= 1"):
            ConfigReader({"heads": value}, {}).integer("heads")

    @pytest.mark.parametrize("value", ["1e-6", True, [1]])
    def test_a_number(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="eps must be a number"):
            ConfigReader({"eps": value}, {}).number("eps")

    @pytest.mark.parametrize("value", [0, 1, "true"])
    def test_a_flag(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="tie must be true or false"):
            ConfigReader({"tie": value}, {}).flag("tie")

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({}, (1e4, 4)),
            ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, (5e5, 8)),
            ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.0}}, (1e7, 16)),
            ({"rope_parameters": {"rope_theta": 1e7}, "partial_rotary_factor": 0.5}, (1e7, 8)),
            ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}, "rope_theta": 1e6}, (1e6, 4)),
            ({"rope_scaling": None, "rope_theta": 1e6}, (1e6, 4)),
            ({"rope_parameters": {"rope_theta": None}, "rope_theta": None}, (1e4, 4)),
        ],
    )
    def test_rope_in_both_spellings(self, values: dict[str, Any], expected: tuple[float, int]) -> None:
        reader = ConfigReader(values, {"rope_theta": 1e4, "partial_rotary_factor": 0.25})
        assert reader.rope(16) == expected

    @pytest.mark.parametrize("key", ["rope_type", "type"])
    def test_scaled_rope_is_refused(self, key: str) -> None:
        reader = ConfigReader(
            {"rope_scaling": {key: "yarn"}}, {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
        )
        with pytest.raises(ConfigError, match="rope_type = 'yarn' is not supported"):
            reader.rope(16)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"rope_parameters": 5}, "rope_parameters must be an object, got 5"),
            ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a number, got 'x'"),
            ({"rope_theta": 0}, "rope_theta must be above 0, got 0.0"),
            ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number, got 'half'"),
            ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor must be a number, got inf"),
            ({"rope_theta": float("nan")}, "rope_theta must be a number, got nan"),
            ({"rope_theta": 10**400}, "rope_theta must be a number, got 1000"),
        ],
    )
    def test_unusable_rope(self, values: dict[str, Any], message: str) -> None:
        reader = ConfigReader(values, {"rope_theta": 1e4, "partial_rotary_factor": 1.0})
        with pytest.raises(ConfigError, match=message):
            reader.rope(16)

    def test_layer_types(self) -> None:
        defaults = {"full_attention_interval": 4}
        reader = ConfigReader({"num_hidden_layers": 5}, defaults)
        assert reader.layer_types() == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
        reader = ConfigReader({"num_hidden_layers": 4, "full_attention_interval": 2}, defaults)
        assert reader.layer_types() == (LINEAR, FULL, LINEAR, FULL)
        reader = ConfigReader({"num_hidden_layers": 2, "layer_types": [FULL, LINEAR]}, defaults)
        assert reader.layer_types() == (FULL, LINEAR)
        reader = ConfigReader({"num_hidden_layers": 3, "layer_types": [FULL, LINEAR]}, defaults)
        with pytest.raises(ConfigError, match="layer_types names 2 layers, num_hidden_layers is 3"):
            reader.layer_types()
        reader = ConfigReader({"num_hidden_layers": 2, "layer_types": "ab"}, defaults)
        with pytest.raises(ConfigError, match="layer_types must be a list, got 'ab'"):
            reader.layer_types()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),
        (b"[1]", "a JSON object was expected, found list"),
    ],
)
def test_unreadable_json(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(file)
