"""Decode forwards as CUDA graphs: captured once per padded shape, replayed for whatever fits into it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.engine.packing import StepBuffers, StepShape
from onela.state import StepInputs

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128
"""Graphs kept at a time; the one that was not used for the longest time goes first."""
EXACT_DEPTH = 8
"""Up to this depth a graph is made for every depth; beyond, for every eighth."""


@dataclass(frozen=True)
class DecodeGraph:
    """One captured forward.

    Attributes:
        buffers: where its inputs are read. hidden: [N, hidden_size], what a replay writes.
        graph: the `torch.cuda.CUDAGraph`.
    """

    buffers: StepBuffers
    hidden: Tensor
    graph: Any


class DecodeGraphs:
    """The graphs of one model over one state.

    A graph holds pointers and a shape, and nothing of a request: prompts, their lengths, slots and beams are read from
    buffers that `run` fills. It is thrown away when a pool has been replaced by a larger one.

    Args:
        forward: what is captured: a decode forward, [N, hidden_size].
        generation: changes whenever a pointer that the forward uses has changed.
        device: a CUDA device.
    """

    def __init__(
        self, forward: Callable[[StepInputs], Tensor], generation: Callable[[], object], device: torch.device
    ) -> None:
        self.forward = forward
        self.generation = generation
        self.device = device
        self.failure: Exception | None = None
        self.num_captures = 0
        self._graphs: OrderedDict[StepShape, DecodeGraph] = OrderedDict()
        self._made_for: object = None
        self._pool: Any = None

    def run(
        self, requests: Sequence[ActiveRequest], token_table: Tensor, level_starts: Sequence[int]
    ) -> Tensor | None:
        """The hidden rows [N, hidden_size] of a step of these requests, which the next run overwrites.

        None when the forward cannot be captured; then the caller runs it itself, now and later.
        """
        if self.failure is not None:
            return None
        if self._made_for != (now := self.generation()):
            self._drop(len(self._graphs))
            self._made_for = now
        shape = padded_shape(StepShape.of(requests))
        found = self._graphs.get(shape)
        if found is None:
            try:
                found = self._capture(shape)
            except Exception as error:  # whatever forbids it, the step itself must go on
                logger.warning("decode runs without CUDA graphs: %s: %s", type(error).__name__, error)
                self.failure = error
                self._drop(len(self._graphs))
                return None
            self._drop(len(self._graphs) + 1 - MAX_GRAPHS)
            self._graphs[shape] = found
        self._graphs.move_to_end(shape)
        found.buffers.fill(requests, token_table, level_starts)
        found.graph.replay()
        return found.hidden[: sum(request.beams.width for request in requests)]

    def _drop(self, count: int) -> None:
        """Throw away the graphs that were not used for the longest time."""
        if count <= 0:
            return
        if self.device.type == "cuda":
            # One of them may still be running.
            torch.cuda.current_stream(self.device).synchronize()
        for _ in range(count):
            self._graphs.popitem(last=False)
        if not self._graphs:
            # Memory that no graph holds any more goes back; its handle is then worthless.
            self._pool = None

    def _capture(self, shape: StepShape) -> DecodeGraph:
        """Record the forward of a shape. All rows are padding meanwhile, so that no beam's state is touched."""
        buffers = StepBuffers(shape, self.device)
        inputs = buffers.inputs()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Compiles the kernels and makes the libraries' workspaces, neither of which can be captured.
            self.forward(inputs)
            # A capture that fails half-way leaves torch's random numbers unusable: what would fail it is found here.
            with waiting_is_an_error():
                self.forward(inputs)
        stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            hidden = self.forward(inputs)
        self.num_captures += 1
        return DecodeGraph(buffers, hidden, graph)


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, an operation that waits for the GPU raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it does not know every such operation.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def padded_shape(shape: StepShape) -> StepShape:
    """The shape that stands for all with a few rows, requests or ancestors less."""
    rows = shape.num_rows
    step = max(16, (1 << (rows - 1).bit_length()) // 8)
    depth = shape.depth if shape.depth <= EXACT_DEPTH else -(-shape.depth // 8) * 8
    requests = 1 << (shape.num_requests - 1).bit_length()
    return StepShape(-(-rows // step) * step, requests, depth, shape.some_first)
