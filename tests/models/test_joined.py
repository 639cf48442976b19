"""A decode forward whose products are joined with norms, gates and sums, against the same forward in single ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela import BeamParams
from onela.bench.decode import start
from onela.bench.models import TINY, engine_of, random_model, vocabulary_of
from onela.models import layers
from onela.ops.linear import dispatch

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [TINY, QWEN3], ids=["qwen3_5", "qwen3"])
def test_joined_products_change_a_forward_by_rounding_alone(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(joined: bool) -> torch.Tensor:
        used: list[bool] = []

        def has_added(*given: torch.Tensor) -> bool:
            used.append(joined and found(*given))
            return used[-1]

        with monkeypatch.context() as patch:
            patch.setattr(layers, "has_added", has_added)
            if not joined:
                patch.setattr(dispatch, "has_heads", lambda *given: False)
            model = random_model(shape, torch.bfloat16, torch.device("cuda"))
            engine = engine_of(model, vocabulary_of(3, 512), "replay", cuda_graphs=False)
            start(engine, 2, 50, BeamParams(beam_width=100))
            with torch.inference_mode():
                hidden = torch.cat(engine.runner.decode(engine.scheduler.schedule().decode)).float()
            assert any(used) == joined
        assert hidden.shape[0] == 200
        return hidden

    found = layers.has_added
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("joined products are Hopper's")
    apart, joined = forward(False), forward(True)
    # The same beams; single ops round to bf16 what stays wide in a joined product.
    difference = (joined - apart).square().mean().sqrt() / apart.square().mean().sqrt()
    assert difference < 2**-5
