"""The formulas: the published ratios, and what is really allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from onela import BeamParams, Engine, Request
from onela.engine.verify import VARIANTS
from onela.errors import ConfigError
from onela.models.footprint import module_bytes, row_bytes, weight_bytes
from onela.state.capacity import (
    ARMS,
    FIT_ARMS,
    Capacity,
    RequestSize,
    ServedModel,
    Workload,
    max_requests,
    own_capacity,
    pool_bytes,
    published_capacity,
    spare_slots,
)
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
    options = {**options, "record_dtype": record_dtype, "max_slots": 3 * 24 * 2}
    engine = tiny_engine(tmp_path, vocabulary, None, **options)
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


@pytest.mark.parametrize("arm", FIT_ARMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_fits_is_what_the_pools_allocate(tmp_path: Any, arm: str, dtype: str) -> None:
    """The pools of as many requests as fit, byte for byte; and one request more would not fit."""
    save_qwen3_5(tmp_path)
    kind = getattr(torch, dtype)
    vocabulary = vocabulary_of(24, 24, 24)
    sizes = {"tokens": 100, "widths": (20, 24, 24, 16)}
    served = ServedModel(
        tiny_engine(tmp_path, vocabulary, None).model.config.geometry,
        weight_bytes=weight_bytes(tmp_path, kind, num_head_rows=72),
        dtype=kind,
        record_dtype=kind,
        page_size=16,
        max_batch_rows=100,
    )
    request = RequestSize(sizes["tokens"], sizes["widths"])
    memory = (1 << 30) + served.weight_bytes + (6 << 20)
    fit = max_requests(served, arm, request, memory)
    assert fit.total <= memory < fit.total + fit.request_bytes
    assert fit.num_requests > 1
    count = fit.num_requests
    spare = spare_slots(served, request, count)
    engine = tiny_engine(
        tmp_path,
        vocabulary,
        None,
        dtype=dtype,
        page_size=16,
        max_prompts=count,
        max_slots=count * request.num_slots + spare,
        max_pages=count * 7,
        **dict(VARIANTS)[arm],
    )
    assert module_bytes(engine.model, kind) + 72 * engine.model.config.hidden_size * kind.itemsize == (
        served.weight_bytes
    )
    prompts, records, backend = engine.state.prompts, engine.state.records, engine.state.backend
    for _ in range(count):
        prompts.allocate(request.prompt_tokens)
        records.admit(request.num_slots, spare)
    backend.reserve(count * request.num_rows, len(request.widths) - 1)
    held = prompts.nbytes + records.nbytes + backend.own_nbytes
    assert held == sum(pool_bytes(served, arm, request, count).values())
    assert not prompts.fits(1)
    assert not records.slots.fits(1)


def test_the_shape_of_a_published_model() -> None:
    """W=256, O=7, prompts of 5K in 139 GiB, Qwen3.5-0.8B's layers: replay holds ten times as many requests."""
    layers = [GatedDeltaGeometry(16, 16, 128, 128)] * 18 + [AttentionGeometry(2, 256)] * 6
    served = ServedModel(layers, weight_bytes=3 << 29, row_bytes=40_000, num_codes=8192)
    request = RequestSize(5120, (256,) * 7)
    fits = {arm: max_requests(served, arm, request, 139 << 30).num_requests for arm in ARMS}
    assert fits["replay"] >= 10 * fits["full_state_copy"]
    assert fits["replay_ssm"] < fits["replay"]


def test_unusable_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens: at least 1"):
        RequestSize(0, (4,))
    with pytest.raises(ConfigError, match="widths: at least 1"):
        RequestSize(1, ())
    with pytest.raises(ConfigError, match="backend: 'x' is none of replay"):
        pool_bytes(ServedModel(LAYERS), "x", RequestSize(1, (1,)), 1)
    assert max_requests(ServedModel(LAYERS), "replay", RequestSize(1, (1, 1)), 1 << 20).num_requests == 0


def test_activations_of_a_row_grow_with_the_model(tmp_path: Any) -> None:
    save_qwen3_5(tmp_path)
    config = tiny_engine(tmp_path, vocabulary_of(24), None).model.config
    wide = dataclasses.replace(config, intermediate_size=10 * config.intermediate_size)
    assert 0 < row_bytes(config, torch.bfloat16) < row_bytes(wide, torch.bfloat16)
    # The residual stream is fp32 in both.
    residual = 4 * config.hidden_size
    half = row_bytes(config, torch.bfloat16) - residual
    assert row_bytes(config, torch.float32) - residual == 2 * half
