"""The engine on a GPU against the engine on the CPU: every backend, with and without graphs, ragged batches."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench.qwen3 import SMALL, SMALL_NEXT
from onela import BeamParams, Engine, EngineConfig, Request, Result
from onela.bench.models import TINY, random_model
from onela.engine.graphs import waiting_is_an_error
from tests.engine.helpers import catalog_of, random_prompt, random_sids, vocabulary_of
from tests.engine.test_engine import BACKENDS, name_of

pytestmark = pytest.mark.gpu

SIZES = (16, 24, 20)
VOCABULARY = vocabulary_of(*SIZES, first=100)
CATALOGS = [catalog_of(random_sids(900, SIZES, seed=seed), VOCABULARY) for seed in (0, 1)]
REQUESTS = [
    Request(prompt_token_ids=random_prompt(length, seed=length), params=BeamParams(beam_width_array=widths))
    for length, widths in [(3, (4, 20, 50)), (70, (16, 16, 16)), (130, (1, 2, 64)), (64, (7, 3, 5))]
]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(TINY, torch.float32, torch.device("cpu"))


def moved(model: Any, dtype: torch.dtype, **overrides: Any) -> Any:
    """The same weights on the GPU."""
    other = random_model(TINY | overrides, dtype, torch.device("cuda"))
    for (name, own), (_, given) in zip(other.named_parameters(), model.named_parameters()):
        own.data.copy_(given.data if name.endswith(("A_log", "dt_bias")) else given.data.to(dtype))
    return other


def engine_of(model: Any, catalog: int = 0, **options: Any) -> Engine:
    return Engine(model, VOCABULARY, CATALOGS[catalog], config=EngineConfig(**options))


def check(results: Sequence[Result], expected: Sequence[Result], tolerance: float) -> None:
    """The same items with the same scores; an item may be missing where its score is a tie with the last one's."""
    for given, wanted in zip(results, expected):
        scores = {item.sid: item.cum_logprob for item in wanted.items}
        assert len({item.sid for item in given.items}) == len(given.items) == len(wanted.items)
        for item, other in zip(given.items, wanted.items):
            assert abs(item.cum_logprob - other.cum_logprob) < tolerance
            assert abs(item.cum_logprob - scores.get(item.sid, other.cum_logprob)) < tolerance


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[Result]]:
    return [engine_of(model, catalog).generate(REQUESTS) for catalog in (0, 1)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_fp32_equals_the_cpu(
    model: Any, expected: list[list[Result]], options: dict[str, Any], graphs: bool
) -> None:
    engine = engine_of(moved(model, torch.float32), cuda_graphs=graphs, **options)
    check(engine.generate(REQUESTS), expected[0], 2e-3)
    if graphs:
        assert engine.runner.graphs is not None
        assert engine.runner.graphs.failure is None
        assert engine.runner.graphs.num_captures == 2
        assert engine.runner.selection_graphs is not None
        assert engine.runner.selection_graphs.failure is None
        assert engine.runner.selection_graphs.num_captures == 3


@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_bf16_scores_every_item_as_the_cpu_does(model: Any, options: dict[str, Any]) -> None:
    """Beams wide enough for the whole catalogue, so that rounding moves scores and not items."""
    widths = BeamParams(beam_width_array=(16, 384, 900))
    requests = [Request(prompt_token_ids=random_prompt(length, seed=length)) for length in (5, 66)]
    wanted = engine_of(model).generate(requests, widths)
    engine = engine_of(moved(model, torch.bfloat16), **options)
    results = engine.generate(requests, widths)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.failure is None
    for given, other in zip(results, wanted):
        scores = {item.sid: item.cum_logprob for item in other.items}
        assert {item.sid for item in given.items} == set(scores)
        differences = torch.tensor([item.cum_logprob - scores[item.sid] for item in given.items])
        assert differences.abs().mean() < 0.3
        assert differences.abs().max() < 2.0


def test_one_graph_serves_changing_prompts_widths_and_catalogues(
    model: Any, expected: list[list[Result]]
) -> None:
    """A graph that kept anything of an earlier request would answer with that request's items."""
    engine = engine_of(moved(model, torch.float32), catalog=1)
    check(engine.generate(REQUESTS), expected[1], 2e-3)
    other = engine_of(engine.model, catalog=0)
    other.runner, other.state, other.scheduler = engine.runner, engine.state, engine.scheduler
    graphs = engine.runner.graphs
    assert graphs is not None
    captures = graphs.num_captures
    check(other.generate(REQUESTS), expected[0], 2e-3)
    check(other.generate(list(reversed(REQUESTS))), list(reversed(expected[0])), 2e-3)
    assert graphs.failure is None
    assert graphs.num_captures == captures
    cpu = engine_of(model)
    for seed in range(4):
        requests = [
            Request(
                prompt_token_ids=random_prompt(20 * seed + 9 * i + 1, seed=50 + seed),
                params=BeamParams(beam_width_array=(10 + i, 12 + seed, 40 + 3 * i)),
            )
            for i in range(3)
        ]
        results = other.generate(requests)
        check(results, cpu.generate(requests), 2e-3)
        distinct = {item.sid for result in results for item in result.items}
        assert len(distinct) > 60
    assert graphs.failure is None


def test_graphs_are_made_anew_when_a_pool_has_grown_and_live_through_a_switch(model: Any) -> None:
    """Old pointers would read freed memory; the old catalogue's items would be illegal."""
    engine = engine_of(moved(model, torch.float32))
    cpu = [engine_of(model, catalog) for catalog in (0, 1)]
    params = BeamParams(beam_width_array=(9, 20, 30))
    first = [Request(prompt_token_ids=random_prompt(11), params=params)]
    check(engine.generate(first), cpu[0].generate(first), 2e-3)
    graphs = engine.runner.graphs
    assert graphs is not None
    captures = graphs.num_captures
    # Longer prompts, more of them, more beams: every pool is replaced.
    more = [Request(prompt_token_ids=random_prompt(700 + i, seed=i), params=params) for i in range(9)]
    check(engine.generate(more), cpu[0].generate(more), 2e-3)
    check(engine.generate(first), cpu[0].generate(first), 2e-3)
    assert graphs.num_captures > captures
    captures = graphs.num_captures
    engine.catalogs.load(CATALOGS[1])
    engine.catalogs.switch()
    check(engine.generate(first), cpu[1].generate(first), 2e-3)
    check(engine.generate(more), cpu[1].generate(more), 2e-3)
    assert graphs.failure is None
    assert graphs.num_captures == captures


def test_graphs_share_their_memory(model: Any) -> None:
    def captured() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) != (0, 0))

    engine = engine_of(moved(model, torch.bfloat16))
    tokens = random_prompt(2000, seed=1)
    gc.collect()  # the graphs of other tests
    torch.cuda.empty_cache()
    before = captured()
    engine.generate([Request(prompt_token_ids=tokens, params=BeamParams(beam_width=64))])
    first = captured() - before
    assert first > 0
    for length in (1700, 1300, 1000, 700):
        engine.generate([Request(prompt_token_ids=tokens[:length], params=BeamParams(beam_width=32))])
    assert engine.runner.num_captures >= 6
    # A few results of their own, and what lies between the blocks.
    assert captured() - before <= 2 * first


def test_what_cannot_be_captured_runs_without_graphs(model: Any) -> None:
    """Head sizes without a kernel go to the references, which wait for the device."""
    shape = TINY | {"linear_value_head_dim": 24}
    cpu = random_model(shape, torch.float32, torch.device("cpu"))
    wanted = engine_of(cpu).generate(REQUESTS)
    engine = engine_of(moved(cpu, torch.float32, linear_value_head_dim=24))
    check(engine.generate(REQUESTS), wanted, 2e-3)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.failure is not None
    check(engine.generate(REQUESTS), wanted, 2e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_every_family_runs_as_graphs(family: str) -> None:
    """In bf16 a mixture of experts is one grouped product, which nobody waits for."""
    shape = SMALL | {"model_type": family} | (SMALL_NEXT if family == "qwen3_next" else {})
    model = random_model(shape, torch.bfloat16, torch.device("cuda"))
    params = BeamParams(beam_width_array=(16, 384, 900))
    scores = []
    for graphs in (True, False):
        engine = engine_of(model, cuda_graphs=graphs)
        results = engine.generate(REQUESTS, params)
        if graphs:
            assert engine.runner.graphs is not None
            assert engine.runner.graphs.failure is None
            assert engine.runner.graphs.num_captures == 2
        scores.append([{item.sid: item.cum_logprob for item in result.items} for result in results])
    for captured, eager in zip(*scores):
        assert captured.keys() == eager.keys()
        assert max(abs(captured[sid] - eager[sid]) for sid in eager) < 0.1


def test_no_step_waits_for_the_device(model: Any) -> None:
    """Between a request's arrival and its answer nothing asks the device for a value, prefill included."""
    engine = engine_of(moved(model, torch.bfloat16))
    engine.generate(REQUESTS)
    active = [engine.submit(request) for request in REQUESTS]
    with waiting_is_an_error():
        engine.step()
        assert all(request.level == 1 for request in active)
        engine.step()
    assert all(request.level == 2 for request in active)
    while any(request.outcome is None for request in active):
        engine.step()
    assert all(isinstance(request.outcome, Result) for request in active)
