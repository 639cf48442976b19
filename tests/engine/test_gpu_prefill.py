"""Prefill on a GPU: captured forwards against the references, padding, cached prefixes, pools that grow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onela import BeamParams, Engine, EngineConfig, Request
from onela.bench.models import TINY, random_model
from onela.engine.active import ActiveRequest
from onela.engine.graphs import waiting_is_an_error
from onela.engine.prefill_packing import eager_inputs, exact_shape
from onela.engine.scheduler import PrefillChunk
from tests.engine.helpers import random_prompt, vocabulary_of

pytestmark = pytest.mark.gpu

VOCABULARY = vocabulary_of(16, 24, first=100)
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# The last layer is a softmax layer in the first, a recurrent one in the second.
MODELS = {"hybrid": TINY, "recurrent last": TINY | {"num_hidden_layers": 3}, "qwen3": QWEN3}
LENGTHS = (3, 70, 130, 64, 1, 300)
# Here prompts are run one after the other, and none is decoded.
CONFIG = EngineConfig(max_tokens_beside_decode=None)


def pair(name: str) -> tuple[Engine, Engine]:
    """An engine over fp32 weights, and one over the same in bf16."""
    device = torch.device("cuda")
    exact, model = (random_model(MODELS[name], dtype, device) for dtype in (torch.float32, torch.bfloat16))
    for own, given in zip(model.parameters(), exact.parameters()):
        own.data.copy_(given.data)
    return Engine(exact, VOCABULARY, config=CONFIG), Engine(model, VOCABULARY, config=CONFIG)


def admit(engine: Engine, lengths: Sequence[int], seed: int = 0) -> list[ActiveRequest]:
    active = []
    for i, length in enumerate(lengths):
        request = Request(prompt_token_ids=random_prompt(length, seed=seed + i))
        active.append(engine.prepare(request, BeamParams(beam_width=4)))
        engine.scheduler.add(active[-1])
    engine.scheduler.schedule()
    return active


def pieces(active: Sequence[ActiveRequest], start: int, end: int) -> list[PrefillChunk]:
    return [
        PrefillChunk(r, start, min(end, len(r.prompt_token_ids)))
        for r in active
        if len(r.prompt_token_ids) > start
    ]


@torch.inference_mode()
def last_rows(engine: Engine, active: Sequence[ActiveRequest], cuts: Sequence[int] = ()) -> Tensor:
    """The hidden row of each prompt's last token, run up to each cut and then to the end."""
    rows = {}
    edges = [0, *cuts, max(len(r.prompt_token_ids) for r in active)]
    for start, end in itertools.pairwise(edges):
        chunks = pieces(active, start, end)
        hidden = engine.runner.prefill(chunks)
        done = [chunk.request for chunk in chunks if chunk.completes]
        rows |= {id(request): row.float().clone() for request, row in zip(done, hidden)}
    return torch.cat([rows[id(request)] for request in active])


@torch.inference_mode()
def reference_rows(engine: Engine, active: Sequence[ActiveRequest]) -> Tensor:
    chunks = pieces(active, 0, 1 << 20)
    inputs = replace(eager_inputs(chunks, engine.state.prompts, engine.device), tables=None)
    return engine.model.prefill(inputs, engine.state).float()


def error(given: Tensor, wanted: Tensor) -> float:
    return float((given - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def captured(engine: Engine) -> Any:
    graphs = engine.runner.prefill_graphs
    assert graphs is not None
    assert graphs.failure is None
    return graphs


@pytest.mark.parametrize("name", MODELS)
def test_captured_prefill_is_as_near_to_fp32_as_the_references(name: str) -> None:
    exact, engine = pair(name)
    wanted = last_rows(exact, admit(exact, LENGTHS))
    allowed = 1.5 * error(reference_rows(engine, admit(engine, LENGTHS)), wanted) + 2e-3
    for cuts in ((), (64,), (63, 65, 200)):
        assert error(last_rows(engine, admit(engine, LENGTHS), cuts), wanted) < allowed
    assert captured(engine).num_captures > 0
    engine.runner.prefill_graphs = None
    assert error(last_rows(engine, admit(engine, LENGTHS), (64,)), wanted) < allowed


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing_and_one_graph_serves_other_prompts(name: str) -> None:
    _, engine = pair(name)
    admit(engine, (900,) * 6)  # the pools need not grow below
    first, second = admit(engine, (70, 50), seed=1), admit(engine, (61, 40, 9), seed=7)
    rows = [last_rows(engine, active) for active in (first, second)]
    assert captured(engine).num_captures == 1
    engine.runner.prefill_graphs = None
    for active, given in zip((first, second), rows):
        states = {
            name: tensor[[r.prompt.index for r in active]].float()
            for name, tensor in engine.state.prompts.prompt_tensors.tensors.items()
        }
        for request in active:
            request.prompt.num_tokens = 0
        assert error(given, last_rows(engine, active)) < 0.03
        for key, tensor in engine.state.prompts.prompt_tensors.tensors.items():
            own = tensor[[r.prompt.index for r in active]].float()
            assert error(states[key], own) < 0.03


def test_prompts_beside_the_batch_keep_their_states() -> None:
    _, engine = pair("hybrid")
    # The pools grow now: a reallocation throws graphs away, and waits for that.
    admit(engine, (900,) * 12)
    kept = admit(engine, (70, 50), seed=1)
    last_rows(engine, kept)
    prompts = engine.state.prompts
    before = [prompts.snapshot(r.prompt) | prompts.read_pages(r.prompt.pages, engine.device) for r in kept]
    last_rows(engine, admit(engine, (33, 128, 5), seed=3), (32,))
    for request, old in zip(kept, before):
        now = prompts.snapshot(request.prompt) | prompts.read_pages(request.prompt.pages, engine.device)
        for key, tensor in old.items():
            assert torch.equal(tensor.nan_to_num(7.0), now[key].nan_to_num(7.0))


def test_graphs_are_dropped_when_a_pool_grows() -> None:
    exact, engine = pair("hybrid")
    admit(engine, (64,))
    last_rows(engine, admit(engine, (60,)))
    captures = captured(engine).num_captures
    last_rows(engine, admit(engine, (62,)))
    generation = engine.state.prompts.generation
    many = admit(engine, (64,) * 13, seed=50)  # with the three above as many as a step takes
    assert engine.state.prompts.generation != generation
    wanted = last_rows(exact, admit(exact, (64,) * 13, seed=50))
    allowed = 1.5 * error(reference_rows(engine, many), wanted) + 2e-3
    assert error(last_rows(engine, many), wanted) < allowed
    assert captured(engine).num_captures > captures


def test_a_budget_cuts_prompts_and_the_items_stay() -> None:
    exact, engine = pair("hybrid")
    requests = [Request(prompt_token_ids=random_prompt(n, seed=n)) for n in (150, 40, 333)]
    cut = Engine(engine.model, VOCABULARY, config=EngineConfig(max_batch_tokens=100))
    cached = Engine(
        engine.model, VOCABULARY, config=EngineConfig(prompt_cache_bytes=1 << 28, prompt_cache_tail=1)
    )
    params = BeamParams(beam_width_array=(16, 384))
    wanted = exact.generate(requests, params)
    for other in (engine, cut, cached, cached):
        for given, expected in zip(other.generate(requests, params), wanted):
            scores = {item.sid: item.cum_logprob for item in expected.items}
            assert {item.sid for item in given.items} == set(scores)
            differences = torch.tensor([item.cum_logprob - scores[item.sid] for item in given.items])
            assert differences.abs().mean() < 0.3
        captured(other)
    assert cached.cache is not None
    assert cached.cache.stats.hits >= 2


def test_nothing_waits_for_the_device() -> None:
    _, engine = pair("hybrid")
    # The pools grow now: a reallocation throws graphs away, and waits for that.
    admit(engine, (900,) * 12)
    last_rows(engine, admit(engine, (70, 50)))
    active = admit(engine, (71, 40), seed=5)
    with torch.inference_mode(), waiting_is_an_error():
        captured(engine).run(pieces(active, 0, 1000))
    assert exact_shape(pieces(active, 0, 1000)).num_tokens == 111


def test_what_cannot_be_captured_runs_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Value heads without a kernel go to the references, which read lengths on the host."""
    shape = TINY | {"linear_value_head_dim": 24}
    device = torch.device("cuda")
    exact, model = (random_model(shape, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    for own, given in zip(model.parameters(), exact.parameters()):
        own.data.copy_(given.data)
    wanted = Engine(exact, VOCABULARY, config=CONFIG)
    engine = Engine(model, VOCABULARY, config=CONFIG)
    rows = last_rows(wanted, admit(wanted, LENGTHS))
    for _ in range(2):
        assert error(last_rows(engine, admit(engine, LENGTHS)), rows) < 0.1
    assert engine.runner.prefill_graphs is not None
    assert engine.runner.prefill_graphs.failure is not None
    assert caplog.text.count("prefill runs without CUDA graphs") == 1


def test_a_warm_engine_captures_nothing_while_it_answers() -> None:
    _, engine = pair("hybrid")
    config = EngineConfig(warm_up_tokens=160, warm_up_requests=2, warm_up_beams=16, max_batch_tokens=160)
    warm = Engine(engine.model, VOCABULARY, config=config)
    graphs = captured(warm)
    assert warm.runner.graphs is not None
    counts = graphs.num_captures, warm.runner.graphs.num_captures
    assert counts[0] >= 2
    params = BeamParams(beam_width_array=(16, 16))
    requests = [Request(prompt_token_ids=random_prompt(n, seed=n)) for n in (70, 90, 150)]
    together, alone = warm.generate(requests[:2], params), warm.generate(requests[2:], params)
    assert (captured(warm).num_captures, warm.runner.graphs.num_captures) == counts
    for given, wanted in zip([*together, *alone], engine.generate(requests, params)):
        scores = {item.sid: item.cum_logprob for item in wanted.items}
        same = [item for item in given.items if item.sid in scores]
        assert len(same) >= 12
        assert max(abs(item.cum_logprob - scores[item.sid]) for item in same) < 0.3
