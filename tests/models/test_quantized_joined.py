"""A float8 model's forwards whose products are joined with norms, gates and sums, against those in single ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela import BeamParams
from onela.bench.decode import start
from onela.bench.models import TINY, engine_of, random_model, vocabulary_of
from onela.models import quantized
from onela.models.quantized import Float8Blocks
from tests.models.test_joined import QWEN3

WIDE: dict[str, Any] = {**TINY, "hidden_size": 128}


def forward(
    shape: dict[str, Any], device: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[str]]:
    """Hidden rows of a decode forward, and which of the joined products had their places in it."""
    used: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("float8_normed_linear", "float8_linear_swiglu", "added_linear_float8"):
            run = getattr(quantized, name)
            patch.setattr(
                quantized, name, lambda *a, run=run, name=name, **k: used.append(name) or run(*a, **k)
            )
        if device == "cpu" or not joined:
            for name in ("has_float8_added", "has_float8_joined"):
                patch.setattr(quantized, name, lambda *given: joined)
        model = random_model(shape, torch.bfloat16, torch.device(device))
        model.quantize()
        engine = engine_of(model, vocabulary_of(3, 512), "replay", cuda_graphs=False, quantization="fp8")
        start(engine, 2, 50, BeamParams(beam_width=100))
        used.clear()
        with torch.inference_mode():
            hidden = torch.cat(engine.runner.decode(engine.scheduler.schedule().decode)).float()
    assert hidden.shape[0] == 200
    return hidden, used


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [WIDE, QWEN3], ids=["qwen3_5", "qwen3"])
def test_joined_products_change_a_forward_by_rounding_alone(
    shape: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("joined products are Hopper's")
    (apart, none), (joined, used) = (forward(shape, device, how, monkeypatch) for how in (False, True))
    assert not none
    layers = shape["num_hidden_layers"]
    # The last norm is read by the head, which is not in float8.
    assert used.count("added_linear_float8") == 2 * layers - 1
    assert used.count("float8_linear_swiglu") == layers
    # The last down-projection, and the mixers' products but the first one's, whose rows a norm has rounded.
    assert used.count("float8_normed_linear") == layers
    # The same beams; rows are rounded to float8 in blocks instead of whole, and where nothing was rounded before.
    difference = (joined - apart).square().mean().sqrt() / apart.square().mean().sqrt()
    assert 0 < difference < 2**-3


def test_rows_know_their_shape() -> None:
    rows = quantized.Float8Rows.of(torch.randn(3, 256))
    blocks = rows.blocks
    assert isinstance(blocks, Float8Blocks)
    assert (blocks.shape, blocks.scales.shape) == ((3, 256), (1, 3))
    weight = quantized.Float8Weight.of(torch.randn(8, 256))
    assert torch.allclose(
        quantized.linear(blocks, weight), quantized.linear(rows, weight), rtol=1e-5, atol=1e-5
    )
