"""Qwen3-Next against transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from onela.errors import ConfigError
from onela.models import load_model
from onela.models.qwen3_next import GroupedGatedDeltaNet, Qwen3Next
from tests import checkpoints
from tests.models.parity import GAIN, assert_bf16_runs, assert_decode_parity, assert_prefill_parity
from tests.tolerances import MODEL

save_qwen3_next = partial(checkpoints.save_qwen3_next, gain=GAIN)


def test_matches_transformers(tmp_path: Path) -> None:
    reference = save_qwen3_next(tmp_path)
    assert_prefill_parity(tmp_path, reference)
    assert_decode_parity(tmp_path, reference)


@pytest.mark.parametrize(
    "overrides",
    [
        {"norm_topk_prob": False},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3]},
        {"num_experts_per_tok": 1},
        {"num_experts": 0},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_options(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert_decode_parity(tmp_path, save_qwen3_next(tmp_path, **overrides))


def test_bf16(tmp_path: Path) -> None:
    assert_bf16_runs(tmp_path, save_qwen3_next(tmp_path, dtype=torch.bfloat16))


def test_experts_load_one_by_one_and_stacked(tmp_path: Path) -> None:
    reference = save_qwen3_next(tmp_path)
    file = tmp_path / "model.safetensors"
    published = load_file(file)
    assert "model.layers.0.mlp.experts.5.gate_proj.weight" in published
    one_by_one = load_model(tmp_path).state_dict()
    stacked = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 48, 48)
    save_file({**stacked, "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}, file)
    together = load_model(tmp_path).state_dict()
    assert one_by_one.keys() == together.keys()
    for name, tensor in one_by_one.items():
        assert torch.equal(tensor, together[name]), name


def test_unfused_projections_agree(tmp_path: Path) -> None:
    reference = save_qwen3_next(tmp_path)
    fused = load_model(tmp_path).model.layers[0].linear_attn
    assert isinstance(fused, GroupedGatedDeltaNet)
    apart = GroupedGatedDeltaNet(load_model(tmp_path).config, 0).requires_grad_(False)
    apart.load_state_dict(reference.model.layers[0].linear_attn.state_dict())
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    for ours, unfused in zip(fused.project(x), apart.project(x)):
        assert_close(ours, unfused, **MODEL)


def test_sparse_layers() -> None:
    values = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 8}
    moe = Qwen3Next.read_config({**values, "num_experts_per_tok": 2}).moe
    assert moe is not None
    assert moe.sparse_layers == {1, 5}
    assert Qwen3Next.read_config({**values, "mlp_only_layers": [1, 3, 5]}).moe is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5 exceeds num_experts = 4"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers, got 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number >= 1, got 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_a_wrong_mixture_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3Next.read_config(values)
