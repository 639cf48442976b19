"""Forwards and selections as CUDA graphs: captured once per padded shape, replayed for whatever fits into it."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from onela.engine.packing import SelectionShape, StepShape
from onela.engine.prefill_packing import PrefillBuffers, exact_shape, fits, shape_for
from onela.engine.scheduler import PrefillChunk
from onela.engine.served import ServedCatalog
from onela.ops.prefill_tables import PrefillShape
from onela.state import PrefillInputs, PromptPool

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128
"""Decode graphs kept at a time; the one that was not used for the longest time goes first."""
MAX_PREFILL_GRAPHS = 320
"""Prefill graphs kept at a time."""
MAX_SELECTION_GRAPHS = 512
"""Graphs of selections kept at a time. They are small."""
EXACT_DEPTH = 8
"""Up to this depth a graph is made for every depth; beyond, for multiples of 8."""

Shape = TypeVar("Shape", bound=Hashable)
Buffers = TypeVar("Buffers")


@dataclass(frozen=True)
class ForwardGraph(Generic[Buffers]):
    """One captured forward.

    Attributes:
        buffers: where its inputs are read. hidden: what a replay writes, if anybody asks for that.
        graph: the `torch.cuda.CUDAGraph`.
    """

    buffers: Buffers
    hidden: Tensor | None
    graph: Any


class ForwardGraphs(ABC, Generic[Shape, Buffers]):
    """The graphs of one kind of forward of one model over one state.

    A graph holds pointers and a shape, and nothing of a request: what a request brings is read from buffers that are
    filled before each replay. It is thrown away when a pool has been replaced by a larger one. Replays follow one
    another, so all graphs work in the same memory, that of the largest; only their results have places of their own.

    Args:
        generation: changes whenever a pointer that the forward uses has changed.
        device: a CUDA device.

    `warm` is set when all shapes that shall come up have been captured: from then on a larger one stands in for a shape
    that is missing, whatever that costs, and a capture is worth a warning.
    """

    kind: str

    def __init__(self, generation: Callable[[], object], device: torch.device) -> None:
        self.generation = generation
        self.device = device
        self.failure: Exception | None = None
        self.num_captures = 0
        self.num_late_captures = 0
        self.warm = False
        self._graphs: OrderedDict[Shape, ForwardGraph[Buffers]] = OrderedDict()
        self._made_for: object = None
        self._tried: set[Hashable] = set()
        self._pool: Any = None
        self._stream: Any = None

    @property
    def latest(self) -> ForwardGraph[Buffers] | None:
        """The graph that was found last, for whoever times it; None: none is kept, as when captures have failed."""
        return next(reversed(self._graphs.values()), None)

    @property
    @abstractmethod
    def max_graphs(self) -> int:
        """The most graphs that are kept."""

    @abstractmethod
    def padded(self, exact: Shape) -> Shape:
        """The shape that stands for all that are a little smaller."""

    @abstractmethod
    def holds(self, room: Shape, exact: Shape) -> bool:
        """Whether a forward of these sizes can run in the shape `room`, whatever it costs."""

    @abstractmethod
    def variant(self, shape: Shape) -> Hashable:
        """What of a shape decides which operations its forward consists of."""

    @abstractmethod
    def make_buffers(self, shape: Shape) -> Buffers:
        """Buffers of a shape, with nothing but padding in them."""

    @abstractmethod
    def forward_over(self, shape: Shape, buffers: Buffers) -> Callable[[], Tensor | None]:
        """The forward that reads these buffers: what is captured."""

    @abstractmethod
    def cost(self, shape: Shape) -> Any:
        """What orders shapes by how much work they are."""

    def find_padded(self, exact: Shape) -> ForwardGraph[Buffers] | None:
        """The graph of a shape that holds a forward of these sizes: see `find`."""
        shape = self.padded(exact)
        if self.warm and shape not in self._graphs:
            fitting = [room for room in self._graphs if self.holds(room, exact)]
            shape = min(fitting, key=self.cost, default=shape)
        return self.find(shape)

    def find(self, shape: Shape, *, ahead: bool = False) -> ForwardGraph[Buffers] | None:
        """The graph of a padded shape, captured now if there is none yet.

        None when the forward cannot be captured; then the caller runs it itself, now and later.

        Args:
            ahead: nobody waits for it yet; `release_memory` is called when all are captured.
        """
        if self.failure is not None:
            return None
        if self._made_for != (now := self.generation()):
            self._drop(len(self._graphs))
            self._made_for = now
        found = self._graphs.get(shape)
        if found is None:
            begun = time.perf_counter()
            try:
                found = self._capture(shape)
            except Exception as error:  # whatever forbids it, the step itself must go on
                logger.warning("%s runs without CUDA graphs: %s: %s", self.kind, type(error).__name__, error)
                self.failure = error
                self._drop(len(self._graphs))
                return None
            if not ahead:
                self.release_memory()
            if self.warm and not ahead:
                self.num_late_captures += 1
                logger.warning(
                    "captured while serving, in %.0f ms: %s %s",
                    1000 * (time.perf_counter() - begun),
                    self.kind,
                    shape,
                )
            self._drop(len(self._graphs) + 1 - self.max_graphs)
            self._graphs[shape] = found
        self._graphs.move_to_end(shape)
        return found

    def release_memory(self) -> None:
        """Give back what the forwards have used that ran before captures: nothing else runs on their stream."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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

    def _capture(self, shape: Shape) -> ForwardGraph[Buffers]:
        """Record the forward of a shape. All rows are padding meanwhile, so that no state is touched."""
        buffers = self.make_buffers(shape)
        forward = self.forward_over(shape, buffers)
        if self._stream is None:
            # One for all: what a capture has freed, the allocator gives to captures on the same stream alone.
            self._stream = torch.cuda.Stream(self.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Compiles the kernels and makes the libraries' workspaces, neither of which can be captured.
            forward()
            # A capture that fails half-way leaves torch's random numbers unusable: what would fail it is found here.
            if self.variant(shape) not in self._tried:
                with waiting_is_an_error():
                    forward()
                self._tried.add(self.variant(shape))
        stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` gives all unused memory back first, which the next of many captures asks for anew.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = forward()
            finally:
                graph.capture_end()
        self.num_captures += 1
        return ForwardGraph(buffers, hidden, graph)


class TableGraphs(ForwardGraphs[Shape, None]):
    """Graphs of what reads its sizes and places from the step's table, and leaves its results in the pools.

    Args:
        forward: runs a step of a shape.
        clear: makes the table describe nothing but padding.
        generation, device: as in `ForwardGraphs`.
    """

    def __init__(
        self,
        forward: Callable[[Shape], Any],
        clear: Callable[[], None],
        generation: Callable[[], object],
        device: torch.device,
    ) -> None:
        super().__init__(generation, device)
        self.forward = forward
        self.clear = clear

    def make_buffers(self, shape: Shape) -> None:
        self.clear()

    def forward_over(self, shape: Shape, buffers: None) -> Callable[[], None]:
        def run() -> None:
            self.forward(shape)

        return run


class DecodeGraphs(TableGraphs[StepShape]):
    """Decode forwards."""

    kind = "decode"

    @property
    def max_graphs(self) -> int:
        return MAX_GRAPHS

    def padded(self, exact: StepShape) -> StepShape:
        return padded_shape(exact)

    def holds(self, room: StepShape, exact: StepShape) -> bool:
        return (
            exact.num_rows <= room.num_rows
            and exact.num_requests <= room.num_requests
            and exact.depth <= room.depth
            and exact.some_first <= room.some_first
        )

    def cost(self, shape: StepShape) -> Any:
        return shape.num_rows, shape.depth, shape.some_first, shape.num_requests

    def variant(self, shape: StepShape) -> Hashable:
        return shape.depth, shape.some_first


class SelectionGraphs(TableGraphs[SelectionShape]):
    """Selections, each from the hidden rows to the survivors in their places."""

    kind = "selection"

    @property
    def max_graphs(self) -> int:
        return MAX_SELECTION_GRAPHS

    def padded(self, exact: SelectionShape) -> SelectionShape:
        return padded_selection(exact)

    def holds(self, room: SelectionShape, exact: SelectionShape) -> bool:
        return (
            exact.num_rows <= room.num_rows
            and exact.num_requests <= room.num_requests
            and exact.num_out <= room.num_out
            and self.variant(exact) == self.variant(room)
            and exact.part == room.part
        )

    def cost(self, shape: SelectionShape) -> Any:
        return shape.num_rows, shape.num_out, shape.num_requests

    def variant(self, shape: SelectionShape) -> Hashable:
        return shape.served, shape.level, shape.normalizer, shape.masks

    def forget(self, kept: Collection[ServedCatalog]) -> None:
        """Throw away the graphs over catalogues that are not among these."""
        gone = [shape for shape in self._graphs if shape.served not in kept]
        for shape in gone:
            self._graphs.move_to_end(shape, last=False)
        self._drop(len(gone))
        self._tried = {variant for variant in self._tried if variant[0] in kept}  # type: ignore[index]


class PrefillGraphs(ForwardGraphs[PrefillShape, PrefillBuffers]):
    """Prefill forwards.

    Args:
        forward: a prefill forward that answers for each prompt's last row, [B, hidden_size].
        generation: changes whenever the place has changed where `forward` keeps its rows.
        prompts: the pool whose states and pages it writes.
        device: as in `ForwardGraphs`.
    """

    kind = "prefill"

    def __init__(
        self,
        forward: Callable[[PrefillInputs], Tensor],
        generation: Callable[[], object],
        prompts: PromptPool,
        device: torch.device,
    ) -> None:
        super().__init__(lambda: (prompts.generation, generation()), device)
        self.forward = forward
        self.prompts = prompts

    @property
    def max_graphs(self) -> int:
        return MAX_PREFILL_GRAPHS

    def padded(self, exact: PrefillShape) -> PrefillShape:
        return shape_for(self._graphs, exact)

    def holds(self, room: PrefillShape, exact: PrefillShape) -> bool:
        return fits(room, exact)

    def cost(self, shape: PrefillShape) -> Any:
        return shape.num_tokens, not shape.rectangle, shape.goes_on

    def variant(self, shape: PrefillShape) -> Hashable:
        return shape.num_prompts, shape.rectangle, shape.goes_on

    def make_buffers(self, shape: PrefillShape) -> PrefillBuffers:
        # Whoever reads the pool's tables brings them to the device: nothing may be left to bring during a capture.
        self.prompts.flush()
        return PrefillBuffers(shape, self.prompts, self.device)

    def forward_over(self, shape: PrefillShape, buffers: PrefillBuffers) -> Callable[[], Tensor]:
        inputs = buffers.inputs()
        return lambda: self.forward(inputs)

    def run(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """The last hidden row of each chunk [B, hidden_size], which the next run overwrites; None: see `find`.

        Where prompts go on, it reads the pool's tables as they are on the device, and what has changed in them is
        brought first; otherwise that can wait until the device is at work.
        """
        found = self.find_padded(exact_shape(chunks))
        if found is None or found.hidden is None:
            return None
        if found.buffers.shape.goes_on:
            self.prompts.flush()
        found.buffers.fill(chunks)
        found.graph.replay()
        return found.hidden[: len(chunks)]


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


def padded_rows(rows: int) -> int:
    """Rows that a forward of so many is padded to: a quarter more of them at most, or the next 16."""
    step = max(16, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def padded_shape(shape: StepShape) -> StepShape:
    """The shape that stands for all with a few rows, requests or ancestors less."""
    depth = shape.depth if shape.depth <= EXACT_DEPTH else -(-shape.depth // 8) * 8
    requests = 1 << (shape.num_requests - 1).bit_length()
    return StepShape(padded_rows(shape.num_rows), requests, depth, shape.some_first)


def padded_selection(shape: SelectionShape) -> SelectionShape:
    """The shape that stands for all with a few rows, requests or survivors less."""
    requests = 1 << (shape.num_requests - 1).bit_length()
    rows = requests if shape.level == 0 else padded_rows(shape.num_rows)
    return replace(shape, num_requests=requests, num_rows=rows, num_out=padded_rows(shape.num_out))
