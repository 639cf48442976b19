"""Dense Qwen3 against transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from onela.errors import ConfigError
from onela.models import load_model
from onela.models.qwen3 import Qwen3
from onela.state import AttentionGeometry
from tests import checkpoints
from tests.models.parity import GAIN, assert_bf16_runs, assert_decode_parity, assert_prefill_parity

save_qwen3 = partial(checkpoints.save_qwen3, gain=GAIN)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "head_dim": 8}],
    ids=["plain", "bias", "tied", "no_groups"],
)
def test_matches_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    reference = save_qwen3(tmp_path, **overrides)
    assert_prefill_parity(tmp_path, reference)
    assert_decode_parity(tmp_path, reference)


def test_bf16(tmp_path: Path) -> None:
    assert_bf16_runs(tmp_path, save_qwen3(tmp_path, dtype=torch.bfloat16))


def test_no_layer_has_a_recurrent_state(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    assert load_model(tmp_path).config.geometry == (AttentionGeometry(num_kv_heads=2, head_dim=16),) * 3


def test_the_whole_head_is_rotated() -> None:
    config = Qwen3.read_config({"head_dim": 128, "rope_theta": 1000000})
    assert (config.rotary_dim, config.rope_theta) == (128, 1e6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_attention_heads": 64}, 32),
        ({"num_attention_heads": 16, "num_key_value_heads": None}, 16),
        ({"num_attention_heads": 16, "num_key_value_heads": 8}, 8),
    ],
)
def test_key_heads_as_transformers_reads_them(values: dict[str, Any], expected: int) -> None:
    assert Qwen3.read_config(values).num_key_value_heads == expected
    assert Qwen3Config(**values).num_key_value_heads == expected


@pytest.mark.parametrize(
    "values",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4, "num_hidden_layers": 4},
        {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "use_sliding_window": True},
    ],
)
def test_a_window_that_is_off_does_not_matter(values: dict[str, Any]) -> None:
    assert set(Qwen3.read_config(values).layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
            "use_sliding_window with sliding_window = 512",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
            "'sliding_attention'",
        ),
        (
            {"layer_types": ["linear_attention"], "num_hidden_layers": 1},
            "'linear_attention' is not supported",
        ),
        (
            {"layer_types": ["full_attention"], "num_hidden_layers": 2},
            "names 1 layers, num_hidden_layers is 2",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_changes_the_mathematics_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3.read_config(values)
