"""The formulas: the published ratios, and what is really allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela import BeamParams, Engine, Request
from onela.state.capacity import ARMS, Capacity, Workload, own_capacity, published_capacity
from onela.state.geometry import AttentionGeometry, GatedDeltaGeometry
from tests.engine.helpers import save_qwen3_5, tiny_engine, vocabulary_of

LAYERS = [GatedDeltaGeometry(16, 16, 128, 128), AttentionGeometry(2, 256)]


def by_arm(lines: list[Capacity]) -> dict[str, Capacity]:
    return {line.arm: line for line in lines}


@pytest.mark.parametrize(("num_steps", "published", "own"), [(2, 56.5, 110.0), (6, 20.3, 39.0)])
def test_the_published_ratios(num_steps: int, published: float, own: float) -> None:
    workload = Workload(num_requests=4, beam_width=512, num_steps=num_steps)
    lines = by_arm(published_capacity(LAYERS, workload))
    full, replay = lines["full_state_copy"], lines["replay"]
    assert round(full.persistent / replay.persistent, 1) == published
    assert round(full.written_per_step / replay.written_per_step) == 127
    ours = by_arm(own_capacity(LAYERS, workload))["replay"]
    assert full.persistent / ours.persistent >= own
    assert full.written_per_step / ours.written_per_step >= 250


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        ("replay", {"recurrent_backend": "replay"}),
        ("full_state_copy", {"recurrent_backend": "full_state", "full_state_mode": "copy"}),
        ("full_state_read_parent", {"recurrent_backend": "full_state", "full_state_mode": "read_parent"}),
        ("replay_ssm", {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "per_beam"}),
        ("replay_ssm_shared", {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "shared"}),
    ],
)
@pytest.mark.parametrize("record_dtype", ["float32", "bfloat16"])
def test_the_formula_is_what_is_allocated(
    tmp_path: Any, arm: str, options: dict[str, Any], record_dtype: str
) -> None:
    """Equal widths at every step, so that nothing but the workload decides; the prompts' share is added by hand."""
    save_qwen3_5(tmp_path)
    vocabulary = vocabulary_of(24, 24, 24)
    engine = tiny_engine(tmp_path, vocabulary, None, record_dtype=record_dtype, **options)
    engine.generate([Request(prompt_token_ids=[1, 2, 3 + i]) for i in range(3)], BeamParams(beam_width=24))
    layers = engine.model.config.geometry
    workload = Workload(num_requests=3, beam_width=24, num_steps=2)
    lines = own_capacity(layers, workload, dtype=torch.float32, record_dtype=getattr(torch, record_dtype))
    expected = by_arm(lines)[arm].persistent
    assert set(by_arm(lines)) == set(ARMS)
    index = 3 * 24 * 2 * 4 if arm == "replay" else 0
    assert held(engine) + index == expected


def held(engine: Engine) -> int:
    """Bytes of the beams' backend and of the prompts' recurrent states."""
    states = [
        engine.state.prompts.layer(i, "recurrent_state").nbytes
        for i, layer in enumerate(engine.model.config.geometry)
        if isinstance(layer, GatedDeltaGeometry)
    ]
    return engine.state.backend.nbytes + sum(states)
