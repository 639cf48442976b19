"""What is kept of a captured forward, and what is not: with a stand-in for CUDA's graphs that runs the forward anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onela import BeamParams, Engine, EngineConfig, Request
from onela.engine.graphs import (
    MAX_GRAPHS,
    DecodeGraphs,
    ForwardGraph,
    ForwardGraphs,
    SelectionGraphs,
    padded_shape,
)
from onela.engine.packing import SelectionShape, StepShape
from onela.engine.warm_up import decode_shapes, warm_up
from onela.items import MaskPool
from tests.engine.helpers import (
    catalog_of,
    random_prompt,
    random_sids,
    save_qwen3_5,
    tiny_engine,
    vocabulary_of,
)

SIZES = (6, 8, 7)
VOCABULARY = vocabulary_of(*SIZES)
CATALOGS = [catalog_of(random_sids(120, SIZES, seed=seed), VOCABULARY) for seed in (0, 1)]


class Recorded:
    """Runs the forward anew over what it was recorded with; pointers that moved since are an error."""

    def __init__(self, graphs: ForwardGraphs[Any, Any], run: Callable[[], object]) -> None:
        self.graphs, self.run = graphs, run
        self.generation = graphs.generation()
        self.replays = 0

    def replay(self) -> None:
        assert self.graphs.generation() == self.generation, "a stale graph"
        self.replays += 1
        self.run()


class FakeDecodeGraphs(DecodeGraphs):
    def _capture(self, shape: StepShape) -> ForwardGraph[None]:
        return record(self, shape)


class FakeSelectionGraphs(SelectionGraphs):
    def _capture(self, shape: SelectionShape) -> ForwardGraph[None]:
        return record(self, shape)


def record(graphs: ForwardGraphs[Any, Any], shape: Any) -> ForwardGraph[Any]:
    """A stand-in for a captured graph; as for a real one, the forward runs once over nothing but padding."""
    buffers = graphs.make_buffers(shape)
    run = graphs.forward_over(shape, buffers)
    run()
    graphs.num_captures += 1
    return ForwardGraph(buffers, None, Recorded(graphs, run))


def with_graphs(engine: Engine, kind: type[DecodeGraphs] = FakeDecodeGraphs) -> DecodeGraphs:
    """Let an engine on a CPU run its steps as graphs."""
    runner = engine.runner
    clear, device = runner.table.clear, engine.device
    runner.selection_graphs = FakeSelectionGraphs(
        runner.select_survivors, clear, runner._selection_generation, device
    )
    runner.graphs = kind(runner.decode_forward, clear, runner._decode_generation, device)
    return runner.graphs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_qwen3_5(path, gain=0.5)
    return path


def requests(seed: int, widths: list[tuple[int, ...]]) -> list[Request]:
    return [
        Request(
            prompt_token_ids=random_prompt(3 + 5 * i + 3 * seed, seed=10 * seed + i),
            params=BeamParams(beam_width_array=width),
        )
        for i, width in enumerate(widths)
    ]


def test_a_graph_serves_changing_prompts_widths_and_catalogues(path: Path) -> None:
    plain = [tiny_engine(path, VOCABULARY, catalog) for catalog in CATALOGS]
    graphed = tiny_engine(path, VOCABULARY, CATALOGS[0])
    graphs = with_graphs(graphed)
    other = tiny_engine(path, VOCABULARY, CATALOGS[1])
    other.runner, other.state, other.scheduler = graphed.runner, graphed.state, graphed.scheduler
    captures = []
    for seed, widths in enumerate(
        [
            [(6, 9, 9), (2, 9, 9), (3, 5, 5)],
            [(6, 9, 9), (2, 7, 9), (3, 6, 5)],
            [(4, 9, 3), (6, 7, 9), (1, 6, 5)],
        ]
    ):
        for engine, expected in zip((graphed, other), plain):
            batch = requests(seed, widths)
            for given, wanted in zip(engine.generate(batch), expected.generate(batch)):
                assert [item.sid for item in given.items] == [item.sid for item in wanted.items]
                assert len({item.sid for item in given.items}) == len(given.items)
        captures.append(graphs.num_captures)
    # Eleven and 23 rows, then 11 and 22: two padded shapes serve all.
    assert captures == [2, 2, 2]
    assert graphs.failure is None


def test_a_graph_outlives_a_switch_of_the_catalogue(path: Path) -> None:
    """Requests of both versions in one replay, then of the new one alone: each gets its own catalogue's items."""
    plain = [tiny_engine(path, VOCABULARY, catalog) for catalog in CATALOGS]
    engine = tiny_engine(path, VOCABULARY, CATALOGS[0])
    graphs = with_graphs(engine)
    asked = requests(0, [(6, 9, 9), (5, 9, 9)])
    early = engine.submit(asked[0])
    engine.catalogs.load(CATALOGS[1])
    engine.catalogs.switch()
    late = engine.submit(asked[1])
    while early.outcome is None or late.outcome is None:
        engine.step()
    seen: set[tuple[int, ...]] = set()
    for request, given, version in zip(asked, (early, late), plain):
        [wanted] = version.generate([request])
        assert [item.sid for item in given.outcome.items] == [item.sid for item in wanted.items]
    assert graphs.num_captures == 2
    for seed in range(1, 6):
        asked = requests(seed, [(6, 9, 9), (5, 9, 9)])
        for given, wanted in zip(engine.generate(asked), plain[1].generate(asked)):
            assert [item.sid for item in given.items] == [item.sid for item in wanted.items]
            seen |= {item.sid for item in given.items}
    # A replay that kept anything of its first batch would find the same few items again and again.
    assert len(seen) > 3 * 18
    assert graphs.num_captures == 2


def test_graphs_are_made_anew_when_a_pool_has_grown(path: Path) -> None:
    engine = tiny_engine(path, VOCABULARY, CATALOGS[0])
    graphs = with_graphs(engine)
    first = requests(0, [(6, 6, 6)])
    wanted = engine.generate(first)
    assert graphs.num_captures == 2
    engine.generate([Request(prompt_token_ids=random_prompt(1500), params=BeamParams(beam_width=6))])
    assert graphs.num_captures == 4
    assert [i.sid for i in engine.generate(first)[0].items] == [i.sid for i in wanted[0].items]


def test_a_forward_that_cannot_be_captured_runs_as_it_is(path: Path) -> None:
    class Refusing(DecodeGraphs):
        def _capture(self, shape: StepShape) -> ForwardGraph[None]:
            self.num_captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    engine = tiny_engine(path, VOCABULARY, CATALOGS[0])
    wanted = engine.generate(requests(0, [(6, 6, 6)]))
    graphs = with_graphs(engine, Refusing)
    results = engine.generate(requests(0, [(6, 6, 6)]))
    assert [i.sid for i in results[0].items] == [i.sid for i in wanted[0].items]
    assert isinstance(graphs.failure, RuntimeError)
    assert graphs.num_captures == 1
    assert graphs.latest is None


def test_the_graph_unused_for_longest_goes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onela.engine.graphs.MAX_GRAPHS", 2)
    engine = tiny_engine(path, VOCABULARY, CATALOGS[0])
    graphs = with_graphs(engine)
    small, large = requests(0, [(6, 6, 6)]), requests(0, [(6, 9, 9)] * 3)
    captures, latest = [], []
    for batch in (large, large, small, small, large):
        engine.generate(batch)
        captures.append(graphs.num_captures)
        latest.append(graphs.latest)
    assert captures == [2, 2, 4, 4, 6]
    assert latest[0] is latest[1]
    assert latest[1] is not latest[2]
    assert MAX_GRAPHS > 2


def warm_engine(path: Path) -> tuple[Engine, FakeDecodeGraphs, FakeSelectionGraphs]:
    """An engine that has captured what up to four requests of twelve beams need."""
    config = EngineConfig(warm_up_requests=4, warm_up_beams=12)
    engine = tiny_engine(path, VOCABULARY, CATALOGS[0], warm_up_requests=4, warm_up_beams=12)
    with_graphs(engine)
    warm_up(engine.runner, config, len(SIZES), engine.served)
    engine.runner.seal(prefill=False, decode=True)
    assert isinstance(engine.runner.graphs, FakeDecodeGraphs)
    assert isinstance(engine.runner.selection_graphs, FakeSelectionGraphs)
    return engine, engine.runner.graphs, engine.runner.selection_graphs


def test_after_a_warm_start_a_larger_graph_stands_in_for_one_that_is_missing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, decode, selection = warm_engine(path)
    plain = tiny_engine(path, VOCABULARY, CATALOGS[0])
    captures = decode.num_captures, selection.num_captures
    for widths in (
        [(1, 2, 3)],
        [(3, 9, 9), (1, 1, 1)],
        [(6, 12, 12)] * 4,
        [(2, 5, 3), (6, 12, 7), (1, 12, 12)],
    ):
        for given, wanted in zip(engine.generate(requests(3, widths)), plain.generate(requests(3, widths))):
            assert [item.sid for item in given.items] == [item.sid for item in wanted.items]
    assert (decode.num_captures, selection.num_captures) == captures
    assert engine.runner.num_late_captures == 0
    assert not caplog.records
    engine.generate(requests(4, [(6, 40, 40)] * 4))
    assert engine.runner.num_late_captures > 0
    assert "captured while serving" in caplog.text


def test_a_warm_start_has_graphs_of_as_many_requests_as_come_and_of_narrower_ones(path: Path) -> None:
    _, decode, selection = warm_engine(path)
    captures = decode.num_captures, selection.num_captures
    for count in (1, 2, 3, 4):
        exact = StepShape(12 * count, count, 0, some_first=True)
        decode.find_padded(exact)
        assert next(reversed(decode._graphs)) == padded_shape(exact)
    decode.find_padded(StepShape(12, 4, 0, some_first=True))
    assert next(reversed(decode._graphs)) == StepShape(16, 4, 0, some_first=True)
    assert (decode.num_captures, selection.num_captures) == captures


def test_requests_with_filters_find_their_graphs_after_a_warm_start(path: Path) -> None:
    engine, _, selection = warm_engine(path)
    plain = tiny_engine(path, VOCABULARY, CATALOGS[0])
    masks = engine.served.masks
    assert masks is not None
    captures, rows = selection.num_captures, masks.rows.data_ptr()
    for count in (1, 2, 3, 4):  # three run in the graph of four
        asked = requests(count, [(6, 12, 12)] * count)
        shut_out = [plain.generate([request])[0].items[0].item_ids[0] for request in asked]
        filtered = [
            dataclasses.replace(request, exclude_item_ids=[item]) for request, item in zip(asked, shut_out)
        ]
        batch = filtered if count != 2 else [filtered[0], asked[1]]  # those without filters may be among them
        for given, wanted in zip(engine.generate(batch), plain.generate(batch)):
            assert [item.sid for item in given.items] == [item.sid for item in wanted.items]
    assert selection.num_captures == captures
    assert engine.runner.num_late_captures == 0
    assert masks.rows.data_ptr() == rows
    assert masks.num_taken == 0


def test_a_catalogue_without_room_for_masks_is_served_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _, _ = warm_engine(path)

    def no_room(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MaskPool, "reserve", no_room)
    engine.catalogs.load(CATALOGS[1])
    while engine.get_ready():
        pass
    assert "no room for masks" in caplog.text
    engine.catalogs.switch()
    wanted = tiny_engine(path, VOCABULARY, CATALOGS[1]).generate(requests(5, [(6, 12, 12)]))
    given = engine.generate(requests(5, [(6, 12, 12)]))
    assert [item.sid for item in given[0].items] == [item.sid for item in wanted[0].items]


def test_where_decodes_end_first_no_graphs_of_mixed_depths_are_captured() -> None:
    options = {"warm_up_requests": 3, "warm_up_beams": 12}
    first = decode_shapes(EngineConfig(**options), num_levels=4)
    mixed = decode_shapes(EngineConfig(**options, max_tokens_beside_decode=None), num_levels=4)
    assert {(shape.depth, shape.some_first) for shape in first} == {(0, True), (1, False), (2, False)}
    assert {(shape.depth, shape.some_first) for shape in mixed} == {
        (0, True), (1, False), (1, True), (2, False), (2, True)
    }  # fmt: skip
    # More beams than one forward may have take turns, and then stand at different depths.
    assert len(decode_shapes(EngineConfig(**options, max_batch_rows=24), num_levels=4)) == len(mixed)


def test_a_catalogue_is_got_ready_before_it_is_switched_to(path: Path) -> None:
    engine, _, selection = warm_engine(path)
    wanted = tiny_engine(path, VOCABULARY, CATALOGS[1]).generate(requests(5, [(6, 12, 12)]))
    per_catalogue = selection.num_captures
    assert not engine.get_ready()
    engine.catalogs.load(CATALOGS[1])
    engine.generate(requests(5, [(6, 12, 12)]))
    assert per_catalogue < selection.num_captures < 2 * per_catalogue, "a step captures one at most"
    while engine.get_ready():
        pass
    assert selection.num_captures == 2 * per_catalogue
    engine.catalogs.switch()
    given = engine.generate(requests(5, [(6, 12, 12)]))
    assert [item.sid for item in given[0].items] == [item.sid for item in wanted[0].items]
    assert selection.num_captures == 2 * per_catalogue
    assert engine.runner.num_late_captures == 0
    # A third one: the first is neither served nor the one before it any more.
    engine.catalogs.load(CATALOGS[0])
    engine.catalogs.switch()
    while engine.get_ready():
        pass
    assert len({shape.served for shape in selection._graphs}) == 2
