"""Buckets, and prompts packed into them: with a stand-in for CUDA's graphs, on a CPU, the answers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onela import BeamParams, Engine, EngineConfig, Request
from onela.engine.graphs import ForwardGraph, PrefillGraphs
from onela.engine.prefill_packing import (
    PrefillBuffers,
    bucket,
    buckets_up_to,
    padded_prefill_shape,
    shape_for,
    stand_in,
)
from onela.engine.warm_up import decode_shapes, prefill_shapes, warm_up
from onela.ops.prefill_tables import PrefillShape
from tests.engine.helpers import (
    catalog_of,
    random_prompt,
    random_sids,
    save_qwen3_5,
    tiny_engine,
    vocabulary_of,
)
from tests.engine.test_graphs import Recorded, with_graphs

SIZES = (6, 8, 7)
VOCABULARY = vocabulary_of(*SIZES)
CATALOG = catalog_of(random_sids(120, SIZES), VOCABULARY)
PARAMS = BeamParams(beam_width=12)


class FakePrefillGraphs(PrefillGraphs):
    def _capture(self, shape: PrefillShape) -> ForwardGraph[PrefillBuffers]:
        buffers = self.make_buffers(shape)
        forward = self.forward_over(shape, buffers)
        hidden = forward().clone()
        self.num_captures += 1
        return ForwardGraph(buffers, hidden, Recorded(self, lambda: hidden.copy_(forward())))


def with_prefill_graphs(engine: Engine, kind: type[PrefillGraphs] = FakePrefillGraphs) -> PrefillGraphs:
    runner = engine.runner
    runner.prefill_graphs = kind(runner.captured_prefill, lambda: 0, engine.state.prompts, engine.device)
    return runner.prefill_graphs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_qwen3_5(path, gain=0.5)
    return path


def requests(*lengths: int, seed: int = 0) -> list[Request]:
    return [Request(prompt_token_ids=random_prompt(n, seed=seed + i)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_tokens": 40}, {"prompt_cache_bytes": 1 << 28, "prompt_cache_tail": 1}],
    ids=["whole", "in pieces", "cached"],
)
def test_padded_prefill_gives_the_same_items(path: Path, options: dict[str, int]) -> None:
    plain = tiny_engine(path, VOCABULARY, CATALOG)
    padded = tiny_engine(path, VOCABULARY, CATALOG, page_size=16, **options)
    graphs = with_prefill_graphs(padded)
    for seed in (0, 0, 7):
        batch = requests(70, 3, 129, 64, 1, seed=seed)
        for given, wanted in zip(padded.generate(batch, PARAMS), plain.generate(batch, PARAMS)):
            assert [item.sid for item in given.items] == [item.sid for item in wanted.items]
            for item, other in zip(given.items, wanted.items):
                assert abs(item.cum_logprob - other.cum_logprob) < 1e-4
    assert graphs.failure is None
    if not options:
        assert graphs.num_captures == 1


def test_graphs_are_made_anew_when_a_pool_has_grown(path: Path) -> None:
    engine = tiny_engine(path, VOCABULARY, CATALOG)
    graphs = with_prefill_graphs(engine)
    wanted = engine.generate(requests(30), PARAMS)
    engine.generate(requests(33), PARAMS)
    assert graphs.num_captures == 1
    engine.generate(requests(*[20] * 9), PARAMS)
    assert graphs.num_captures > 1
    assert engine.generate(requests(30), PARAMS)[0].items[0].sid == wanted[0].items[0].sid


def test_a_forward_that_cannot_be_captured_runs_as_it_is(path: Path) -> None:
    class Refusing(PrefillGraphs):
        def _capture(self, shape: PrefillShape) -> ForwardGraph[PrefillBuffers]:
            self.num_captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    engine = tiny_engine(path, VOCABULARY, CATALOG)
    wanted = engine.generate(requests(30, 5), PARAMS)
    graphs = with_prefill_graphs(engine, Refusing)
    for _ in range(2):
        for given, expected in zip(engine.generate(requests(30, 5), PARAMS), wanted):
            assert [item.sid for item in given.items] == [item.sid for item in expected.items]
    assert isinstance(graphs.failure, RuntimeError)
    assert graphs.num_captures == 1


def test_buckets_cost_little() -> None:
    assert bucket(1) == 64
    for tokens in (*range(1, 3000), 4096, 5000, 5120, 5121, 16384, 20480, 20481):
        padded = bucket(tokens)
        assert padded >= tokens
        assert bucket(padded) == padded
        assert padded - tokens <= max(tokens // (16 if tokens > 1024 else 8), 63)
    assert [bucket(n) for n in (4096, 5120, 20480)] == [4096, 5120, 20480]


@pytest.mark.parametrize("limit", [64, 65, 300, 1000, 5120, 16384])
def test_a_few_buckets_hold_any_number_of_tokens(limit: int) -> None:
    buckets = buckets_up_to(limit)
    assert len(buckets) < 80
    assert max(buckets) == bucket(limit)
    for tokens in range(1, limit + 1):
        captured = [PrefillShape(T, 4, T) for T in buckets]
        room = stand_in(captured, PrefillShape(tokens, 2, -(-tokens // 2)))
        assert room is not None, tokens
        assert tokens <= room.num_tokens <= max(tokens * 9 / 8, tokens + 96)
        if tokens > 1024:
            assert room.num_tokens == bucket(tokens)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (PrefillShape(1000, 1, 1000, rectangle=True), PrefillShape(1024, 1, 1024, rectangle=True)),
        (PrefillShape(1000, 2, 500), PrefillShape(1024, 4, 1024)),
        (PrefillShape(1000, 2, 500, goes_on=True), PrefillShape(1024, 4, 1024, goes_on=True)),
        (PrefillShape(1000, 5, 500), PrefillShape(1024, 16, 1024, goes_on=True)),
        (PrefillShape(1000, 5, 500, goes_on=True), PrefillShape(1024, 16, 1024, goes_on=True)),
        (PrefillShape(1000, 17, 100), None),
        (PrefillShape(1030, 2, 515), None),
        (PrefillShape(900, 2, 450), None),
    ],
)
def test_a_captured_shape_stands_in_for_what_it_holds(
    shape: PrefillShape, expected: PrefillShape | None
) -> None:
    captured = [PrefillShape(1024, 1, 1024, rectangle=True), PrefillShape(1024, 4, 1024)]
    captured += [PrefillShape(1024, B, 1024, goes_on=True) for B in (4, 16)]
    assert stand_in(captured, shape) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PrefillShape(70, 1, 70), PrefillShape(96, 1, 96, rectangle=True)),
        (PrefillShape(70, 2, 40), PrefillShape(96, 4, 96)),
        (PrefillShape(4 * 5120 - 9, 4, 5120), PrefillShape(20480, 4, 5120, rectangle=True)),
        (PrefillShape(5120, 4, 2000), PrefillShape(5120, 4, 5120)),
        (PrefillShape(5120, 5, 2000), PrefillShape(5120, 16, 2048)),
        (PrefillShape(512, 1, 512, True), PrefillShape(512, 1, 512, True)),
        (PrefillShape(512, 2, 300, True), PrefillShape(512, 4, 512, True)),
        (PrefillShape(16000, 17, 30, True), PrefillShape(16384, 64, 512, True)),
    ],
)
def test_shapes_have_room_for_their_padding(given: PrefillShape, expected: PrefillShape) -> None:
    assert padded_prefill_shape(given) == expected
    assert padded_prefill_shape(expected) == expected


def test_the_first_of_a_length_runs_without_padding() -> None:
    def alone(tokens: int) -> PrefillShape:
        return PrefillShape(tokens, 1, tokens, rectangle=True)

    captured: list[PrefillShape] = []
    for tokens, room in ((5000, 5000), (4993, 5000), (4500, 5000), (4400, 4400), (5001, 5120), (5100, 5120)):
        shape = shape_for(captured, alone(tokens))
        assert shape == alone(room), tokens
        captured += [shape] if shape not in captured else []
    assert len(captured) == 3
    assert shape_for(captured, PrefillShape(5000, 1, 5000, True)) == PrefillShape(5000, 1, 5000, True)
    assert shape_for([], PrefillShape(4 * 5000 - 3, 4, 5000)) == PrefillShape(20000, 4, 5000, rectangle=True)


def test_growing_prompts_capture_few_shapes() -> None:
    captured: set[PrefillShape] = set()
    for tokens in range(1000, 9000):
        captured.add(shape_for(captured, PrefillShape(tokens, 1, tokens, rectangle=True)))
    assert len(captured) < 60


def test_a_warm_engine_captures_nothing_more(path: Path) -> None:
    engine = tiny_engine(path, VOCABULARY, CATALOG)
    prefill, decode = with_prefill_graphs(engine), with_graphs(engine)
    config = EngineConfig(warm_up_tokens=300, warm_up_requests=4, warm_up_beams=12, max_batch_tokens=300)
    assert warm_up(engine.runner, config, len(SIZES), engine.served) > 0
    captures = prefill.num_captures, decode.num_captures
    assert captures[0] == len(list(prefill_shapes(config))) >= len(buckets_up_to(300))
    assert captures[1] == len(decode_shapes(config, len(SIZES)))
    for lengths in ((70,), (30, 60, 20), (90, 90, 3, 60), (1, 1), (300,), (150, 140), (251,)):
        # Twelve beams are more than the first level has codes: the later levels alone are as wide.
        engine.generate(requests(*lengths), BeamParams(beam_width_array=(6, 12, 12)))
    assert prefill.num_captures == captures[0]
    assert torch.isfinite(engine.generate(requests(5), PARAMS)[0].items[0].cum_logprob * torch.ones(1)).all()
