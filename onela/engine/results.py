"""From beams to items: order, look up, name."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from onela.decoding import HostBeams
from onela.engine.active import ActiveRequest
from onela.engine.request import FinishReason, RecommendedItem, Result, Timings, Usage
from onela.items import SidVocabulary

T = TypeVar("T")


class Fetch:
    """The beams of finished requests on their way to the host, which nobody waits for.

    Args:
        requests: finished ones. `read` may be called when the device has got to the end of what it was given before.
    """

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self._requests = requests
        self._rows: list[Tensor] = []
        for request in requests:
            rows = request.pool.rows[request.first_row : request.first_row + request.width]
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            self._rows.append(host.copy_(rows, non_blocking=True))

    def read(self) -> list[HostBeams]:
        """The beams of each request."""
        return [
            HostBeams.of(rows.numpy(), request.level, request.pool.num_levels)
            for request, rows in zip(self._requests, self._rows)
        ]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python's cyclic garbage collector does not run.

    Thousands of new objects set it off again and again, and now and then it looks through every object there is: with
    a model loaded that is a tenth of a second in the middle of an answer.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collection()
def make_result(request: ActiveRequest, beams: HostBeams, vocabulary: SidVocabulary, *, now: float) -> Result:
    """Order a finished request's beams by score and look up their items; `now` is on the scheduler's clock."""
    params, catalog = request.params, request.served.catalog
    scores, leaves, codes, paths = beams.scores, beams.leaves, beams.codes, beams.paths
    # Beams stand in order of their SIDs, and a stable sort keeps that order among equal scores.
    order = np.argsort(-scores, kind="stable")
    order = order[np.isfinite(scores[order])]
    num_legal = len(order)
    order = order[: request.asked]
    length = codes.shape[1]
    sids, tokens = vocabulary.rows(codes[order])
    logprobs: list[Any] = [None] * len(order)
    if request.request.logprobs:
        logprobs = _tuples(list(np.diff(paths[order], axis=1, prepend=np.float32(0)).T))
    item_ids: list[tuple[int | str, ...]] = [()] * len(order)
    titles: list[tuple[str | None, ...]] = [()] * len(order)
    if catalog is not None and length == vocabulary.num_levels:
        bounds, found = catalog.items_at(leaves[order])
        if request.eligibility is not None:
            kept = request.eligibility.kept(found)
            found = found[kept]
            bounds = np.concatenate([[0], np.cumsum(kept)])[bounds]
        item_ids = _runs(bounds, catalog.item_ids(found))
        titles = _runs(bounds, catalog.titles(found))
    totals = scores[order].tolist()
    divisor = length**params.length_penalty
    ranked = totals if divisor == 1 else [total / divisor for total in totals]
    items = RecommendedItem.many(sids, item_ids, titles, totals, ranked, tokens, logprobs)
    enough = len(items) == request.asked
    finish_reason: FinishReason = "stop" if enough else "exhausted"
    return Result(
        items=items,
        finish_reason=finish_reason,
        reason=None
        if enough
        else f"{request.asked} were asked for; of legal ones the beams have {num_legal}",
        usage=Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=length,
            beam_widths=request.widths,
            num_legal=num_legal,
            cached_tokens=request.cached_tokens,
        ),
        request_id=request.request.request_id,
        catalog_version=request.served.version,
        timings=_timings(request, now),
    )


def _tuples(columns: Sequence[np.ndarray]) -> list[Any]:
    """A tuple for each row, from one array per column."""
    return list(zip(*(column.tolist() for column in columns)))


def _runs(bounds: np.ndarray, values: Sequence[T]) -> list[tuple[T, ...]]:
    """Run i is `values[bounds[i] : bounds[i + 1]]`."""
    ends = bounds.tolist()
    if len(values) == len(ends) - 1 and ends == list(range(len(ends))):
        return [(value,) for value in values]
    return [tuple(values[start:end]) for start, end in itertools.pairwise(ends)]


def empty_result(request: ActiveRequest) -> Result:
    """The answer to a request whose filters leave nothing: known before anything has run."""
    usage = Usage(len(request.prompt_token_ids), 0, (), 0)
    return Result(
        items=(),
        finish_reason="filtered",
        reason="no item of the catalogue is left by exclude_item_ids, allow_item_ids and filter",
        usage=usage,
        request_id=request.request.request_id,
        catalog_version=request.served.version,
        timings=Timings(0.0, 0.0, 0.0, 0.0),
    )


def _timings(request: ActiveRequest, now: float) -> Timings | None:
    if request.admitted_at is None or not request.chosen_at:
        return None
    return Timings(
        queue=request.admitted_at - request.arrived_at,
        prefill=request.chosen_at[0] - request.admitted_at,
        decode=request.chosen_at[-1] - request.chosen_at[0],
        total=now - request.arrived_at,
    )
