"""Captures the forwards that requests will need before the first of them comes, so that none waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onela.config import EngineConfig
from onela.engine.graphs import (
    ForwardGraphs,
    PrefillGraphs,
    Shape,
    padded_rows,
    padded_selection,
    padded_shape,
)
from onela.engine.packing import SelectionShape, StepShape
from onela.engine.prefill_packing import LONG, SMALLEST, buckets_up_to
from onela.engine.runner import Runner
from onela.engine.scheduler import MAX_PREFILL_PROMPTS
from onela.engine.served import ServedCatalog
from onela.ops.compile_ahead import compile_ahead
from onela.ops.prefill_tables import PrefillShape

logger = logging.getLogger(__name__)

PREFILL_STEP = 6
"""Of so many prefill forwards the kernels of one are compiled ahead: those of its neighbours are mostly the same."""


def prefill_shapes(config: EngineConfig) -> Iterator[PrefillShape]:
    """Shapes of which one holds any forward of at most `warm_up_tokens` tokens, largest first.

    Of each size one for some prompts, which may go on from a state where there is a prompt cache; and of those that are
    long enough for it to matter, one for a single new prompt.
    """
    if not config.warm_up_tokens:
        return
    limit = max(SMALLEST, min(config.warm_up_tokens, config.max_batch_tokens))
    for T in reversed(buckets_up_to(limit)):
        if T >= LONG:
            yield PrefillShape(T, 1, T, rectangle=True)
        yield PrefillShape(T, MAX_PREFILL_PROMPTS, T, goes_on=config.prompt_cache_bytes > 0)


def decode_shapes(config: EngineConfig, num_levels: int) -> list[StepShape]:
    """Shapes that hold the steps of up to `warm_up_requests` requests of `warm_up_beams` beams.

    They may stand at any mix of depths, unless all who decode end before the next prompts are run. Rows come with room
    for all requests, for beams may be narrower, and then once more with room for no more than have so many beams.
    """
    most = config.warm_up_requests
    mixed = config.max_tokens_beside_decode != 0 or most * config.warm_up_beams > config.max_batch_rows
    shapes: dict[StepShape, None] = {}
    for num_requests, count in [(most, count) for count in range(most, 0, -1)] + [
        (n, n) for n in range(most, 0, -1)
    ]:
        for depth in range(num_levels - 1):
            for some_first in (True, False) if depth and mixed else (depth == 0,):
                rows = count * config.warm_up_beams
                shapes[padded_shape(StepShape(rows, num_requests, depth, some_first))] = None
    return list(shapes)


def selection_shapes(config: EngineConfig, num_levels: int, served: ServedCatalog) -> list[SelectionShape]:
    """The shapes of selections of as many requests, over one catalogue.

    Room for requests is as in `decode_shapes`. Those of requests with filters are fewer: for one request, for two,
    four, and so on, and for all; any number runs in the next larger one. There has to be room for their masks
    beforehand (`reserve_masks`).
    """
    most = config.warm_up_requests
    masks = None if served.masks is None else (served.masks.rows.data_ptr(), len(served.masks.rows))
    wanted: list[tuple[int, int, tuple[int, int] | None]] = [
        (most, count, None) for count in range(most, 0, -1)
    ]
    if masks is not None:
        few = [count for count in range(most, 0, -1) if count == most or count.bit_count() == 1]
        wanted += [(most, count, masks) for count in few]
    wanted += [(count, count, None) for count in range(most, 0, -1)]
    shapes: dict[SelectionShape, None] = {}
    for num_requests, count, masks in wanted:
        for level in range(num_levels):
            beams = count * config.warm_up_beams
            rows = beams if level else count
            shape = SelectionShape(
                served,
                level,
                normalizer="level",
                part=1 + level,
                masks=masks,
                num_requests=num_requests if level else count,
                num_rows=rows,
                num_out=beams,
            )
            shapes[padded_selection(shape)] = None
    return list(shapes)


def reserve_masks(config: EngineConfig, served: ServedCatalog) -> None:
    """Make room for the masks of the requests named by the options, twice over: those under way and those to come."""
    if served.masks is None:
        return
    try:
        served.masks.reserve(2 * config.warm_up_requests)
    except RuntimeError as error:  # out of memory: there will be room for as many as come
        logger.warning("no room for masks ahead of requests with filters: %s", error)


def forwards(
    graphs: ForwardGraphs[Shape, Any] | None, shapes: Sequence[Shape]
) -> Iterator[Callable[[], object]]:
    """What is captured for these shapes, over nothing but padding; of many prefill forwards some of different sizes."""
    if graphs is None:
        return
    shapes = shapes[: graphs.max_graphs]
    if isinstance(graphs, PrefillGraphs):
        shapes = [*shapes[:4], *shapes[4::PREFILL_STEP]]
    for shape in shapes:
        yield graphs.forward_over(shape, graphs.make_buffers(shape))


def capture(graphs: ForwardGraphs[Shape, Any] | None, shapes: Sequence[Shape]) -> int:
    """Capture these shapes, as many as are kept at a time. Returns how many could be."""
    if graphs is None:
        return 0
    begun = time.perf_counter()
    captured = sum(graphs.find(shape, ahead=True) is not None for shape in shapes[: graphs.max_graphs])
    graphs.release_memory()
    level = logging.INFO if len(shapes) > 1 else logging.DEBUG  # while serving they come one by one
    logger.log(
        level, "captured %d graphs of %s in %.1f s", captured, graphs.kind, time.perf_counter() - begun
    )
    if len(shapes) > graphs.max_graphs:
        logger.log(
            level, "%d more are not kept: larger ones take their place", len(shapes) - graphs.max_graphs
        )
    return captured


@torch.inference_mode()
def warm_up(runner: Runner, config: EngineConfig, num_levels: int, served: ServedCatalog) -> float:
    """Make room for what the options name, and capture its forwards and selections. Returns the seconds it took.

    A graph is worthless once a pool has been replaced by a larger one, so the pools get their room first: all that
    their limits allow where they are set, else that of the requests named here.
    """
    start = time.perf_counter()
    state = runner.state
    prompts, records = state.prompts, state.records
    count = max(1, config.warm_up_requests)
    places = config.max_prompts or 4 * count
    page_room = -(-max(config.warm_up_tokens, config.max_batch_tokens) // config.page_size)
    prompts.prompt_tensors.reserve(places)
    if prompts.has_pages:
        prompts.page_tensors.reserve(config.max_pages or 2 * page_room)
    prompts.reserve_table(places, page_room)
    beams = count * config.warm_up_beams
    if num_levels > 1:
        records.pool.reserve(config.max_slots or 2 * beams * (num_levels - 1))
        state.backend.reserve(2 * beams, num_levels - 1)
        runner.beams.reserve(2 * (config.max_prompts or count) * config.warm_up_beams)
        runner.beam_hidden.reserve(padded_rows(2 * beams))
    runner.table.reserve(2 * count, 1)
    reserve_masks(config, served)
    prompts.flush()
    wanted: list[tuple[ForwardGraphs[Any, Any] | None, Sequence[Any]]] = [
        (runner.prefill_graphs, list(prefill_shapes(config))),
        (runner.graphs, decode_shapes(config, num_levels)),
        (runner.selection_graphs, selection_shapes(config, num_levels, served)),
    ]
    if state.prompts.device.type == "cuda":
        compile_ahead(run for graphs, shapes in wanted for run in forwards(graphs, shapes))
    captured = sum(capture(graphs, shapes) for graphs, shapes in wanted)
    taken = time.perf_counter() - start
    logger.info("warmed up in %.1f s: %d graphs captured", taken, captured)
    return taken
