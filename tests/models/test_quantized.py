"""A model in float8: what is rounded, what is not, and how far its answers move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onela import BeamParams, ConfigError, Engine, Request
from onela.bench.models import overlap
from onela.models import load_model
from onela.models.footprint import weight_bytes
from onela.models.layers import FusedLinear
from onela.models.quantized import Float8Linear, Float8Rows, Float8Weight, linear
from onela.ops.linear import float8_linear_ref
from tests.engine.helpers import random_prompt, save_qwen3_5, tiny_engine, vocabulary_of

VOCABULARY = vocabulary_of(24, 24, 24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    save_qwen3_5(path)
    return path


def test_mixers_and_mlps_are_rounded_and_nothing_else(checkpoint: Path) -> None:
    plain = load_model(checkpoint)
    rounded = load_model(checkpoint, quantization="fp8")
    assert (plain.quantization, rounded.quantization) == ("none", "fp8")
    kept = dict(rounded.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in kept and kept[name].numel():
            assert torch.equal(kept[name], parameter)
            assert "proj" not in name or "o_proj" in name or "out_proj" in name
    for module in rounded.modules():
        if isinstance(module, FusedLinear):
            assert isinstance(module.fused, Float8Weight)
            held = [n for n, p in module.named_children() if isinstance(p, nn.Linear) and p.weight.numel()]
            assert held == list(module.kept_wide)
    for one, other in zip(plain.model, rounded.model):
        assert isinstance(other.mlp.down_proj, Float8Linear)
        x = torch.randn(5, other.mlp.down_proj.in_features)
        weight, rows = other.mlp.down_proj.weight, Float8Rows.of(x)
        expected = float8_linear_ref(
            rows.values, rows.scales, weight.values, weight.scales, out_dtype=x.dtype
        )
        assert torch.equal(other.mlp.down_proj(x), expected)
        error = (other.mlp.down_proj(x) - one.mlp.down_proj(x)).norm() / one.mlp.down_proj(x).norm()
        assert 0 < error < 0.06


def test_the_formula_counts_the_bytes_of_the_weights(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype="bfloat16", quantization="fp8")
    held = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, FusedLinear) and isinstance(module.fused, Float8Weight):
            held += module.fused.nbytes
        if isinstance(module, Float8Linear):
            held += module.weight.nbytes
    assert held == weight_bytes(checkpoint, torch.bfloat16, quantization="fp8")
    assert held < weight_bytes(checkpoint, torch.bfloat16)


def test_slices_of_a_weight_and_a_bias() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 12)
    x = torch.randn(3, 16)
    rounded = Float8Linear(layer)
    assert torch.equal(rounded(x) - layer.bias, (linear(x, rounded.weight) + layer.bias) - layer.bias)
    part = linear(x, rounded.weight[4:8])
    assert torch.equal(part, linear(x, rounded.weight)[:, 4:8])
    assert rounded.weight.shape == (12, 16)
    rows = Float8Rows.of(x)
    assert torch.equal(linear(rows, rounded.weight), linear(x, rounded.weight))
    picked = rows.index_select(0, torch.tensor([2, 0]))
    assert torch.equal(linear(picked, rounded.weight), linear(x[[2, 0]], rounded.weight))
    assert (rows.shape, rows.dtype) == ((3, 16), torch.float32)


def test_every_backend_answers_alike(checkpoint: Path) -> None:
    requests = [Request(prompt_token_ids=random_prompt(length, length)) for length in (5, 40, 70)]
    params = BeamParams(beam_width=24)
    plain = tiny_engine(checkpoint, VOCABULARY, None).generate(requests, params)
    engine = tiny_engine(checkpoint, VOCABULARY, None, quantization="fp8")
    share, difference = overlap(plain, engine.generate(requests, params))
    # The weights are random and large, so that neighbours are many; `bench/fp8.py` measures a trained model.
    assert share > 0.4
    assert difference > 0
    # Every backend runs over the same weights.
    other = tiny_engine(checkpoint, VOCABULARY, None, quantization="fp8", recurrent_backend="full_state")
    assert overlap(engine.generate(requests, params), other.generate(requests, params))[0] > 0.95


def test_what_is_not_known_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: 'int4' is none of none, fp8"):
        load_model(checkpoint, quantization="int4")
    with pytest.raises(ConfigError, match="quantization: 'int4' is none of none, fp8"):
        tiny_engine(checkpoint, VOCABULARY, None, quantization="int4")
    engine = tiny_engine(checkpoint, VOCABULARY, None, quantization="fp8")
    with pytest.raises(ConfigError, match="quantization: 'none' was asked for"):
        Engine(engine.model, VOCABULARY)
