"""Forwards as CUDA graphs: captured once per padded shape, replayed for whatever fits into it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.engine.packing import StepBuffers, StepShape
from onela.engine.prefill_packing import PrefillBuffers, exact_shape, shape_for
from onela.engine.scheduler import PrefillChunk
from onela.ops.prefill_tables import PrefillShape
from onela.state import PrefillInputs, PromptPool, StepInputs

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128
"""Decode graphs kept at a time; the one that was not used for the longest time goes first."""
MAX_PREFILL_GRAPHS = 320
"""Prefill graphs kept at a time."""
EXACT_DEPTH = 8
"""Up to this depth a graph is made for every depth; beyond, for every eighth."""

Shape = TypeVar("Shape", bound=Hashable)
Buffers = TypeVar("Buffers")


@dataclass(frozen=True)
class ForwardGraph(Generic[Buffers]):
    """One captured forward.

    Attributes:
        buffers: where its inputs are read. hidden: [N, hidden_size], what a replay writes.
        graph: the `torch.cuda.CUDAGraph`.
    """

    buffers: Buffers
    hidden: Tensor
    graph: Any


class ForwardGraphs(ABC, Generic[Shape, Buffers]):
    """The graphs of one kind of forward of one model over one state.

    A graph holds pointers and a shape, and nothing of a request: what a request brings is read from buffers that are
    filled before each replay. It is thrown away when a pool has been replaced by a larger one. Replays follow one
    another, so all graphs work in the same memory, that of the largest; only their results have places of their own.

    Args:
        generation: changes whenever a pointer that the forward uses has changed.
        device: a CUDA device.
    """

    kind: str

    def __init__(self, generation: Callable[[], object], device: torch.device) -> None:
        self.generation = generation
        self.device = device
        self.failure: Exception | None = None
        self.num_captures = 0
        self._graphs: OrderedDict[Shape, ForwardGraph[Buffers]] = OrderedDict()
        self._made_for: object = None
        self._tried: set[Hashable] = set()
        self._pool: Any = None
        self._stream: Any = None

    @property
    @abstractmethod
    def max_graphs(self) -> int:
        """The most graphs that are kept."""

    @abstractmethod
    def variant(self, shape: Shape) -> Hashable:
        """What of a shape decides which operations its forward consists of."""

    @abstractmethod
    def make_buffers(self, shape: Shape) -> Buffers:
        """Buffers of a shape with nothing but padding in them."""

    @abstractmethod
    def forward_over(self, buffers: Buffers) -> Callable[[], Tensor]:
        """The forward that reads these buffers: what is captured."""

    def find(self, shape: Shape) -> ForwardGraph[Buffers] | None:
        """The graph of a padded shape, captured now if there is none yet.

        None when the forward cannot be captured; then the caller runs it itself, now and later.
        """
        if self.failure is not None:
            return None
        if self._made_for != (now := self.generation()):
            self._drop(len(self._graphs))
            self._made_for = now
        found = self._graphs.get(shape)
        if found is None:
            try:
                found = self._capture(shape)
            except Exception as error:  # whatever forbids it, the step itself must go on
                logger.warning("%s runs without CUDA graphs: %s: %s", self.kind, type(error).__name__, error)
                self.failure = error
                self._drop(len(self._graphs))
                return None
            self._drop(len(self._graphs) + 1 - self.max_graphs)
            self._graphs[shape] = found
        self._graphs.move_to_end(shape)
        return found

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
        forward = self.forward_over(buffers)
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
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            hidden = forward()
        self.num_captures += 1
        return ForwardGraph(buffers, hidden, graph)


class DecodeGraphs(ForwardGraphs[StepShape, StepBuffers]):
    """Decode forwards.

    Args:
        forward: a decode forward, [N, hidden_size].
        generation, device: as in `ForwardGraphs`.
    """

    kind = "decode"

    def __init__(
        self, forward: Callable[[StepInputs], Tensor], generation: Callable[[], object], device: torch.device
    ) -> None:
        super().__init__(generation, device)
        self.forward = forward

    @property
    def max_graphs(self) -> int:
        return MAX_GRAPHS

    def variant(self, shape: StepShape) -> Hashable:
        return shape.depth, shape.some_first

    def make_buffers(self, shape: StepShape) -> StepBuffers:
        return StepBuffers(shape, self.device)

    def forward_over(self, buffers: StepBuffers) -> Callable[[], Tensor]:
        inputs = buffers.inputs()
        return lambda: self.forward(inputs)

    def run(
        self, requests: Sequence[ActiveRequest], token_table: Tensor, level_starts: Sequence[int]
    ) -> Tensor | None:
        """The hidden rows [N, hidden_size] of a step, which the next run overwrites; None: see `find`."""
        found = self.find(padded_shape(StepShape.of(requests)))
        if found is None:
            return None
        found.buffers.fill(requests, token_table, level_starts)
        found.graph.replay()
        return found.hidden[: sum(request.beams.width for request in requests)]


class PrefillGraphs(ForwardGraphs[PrefillShape, PrefillBuffers]):
    """Prefill forwards.

    Args:
        forward: a prefill forward that answers for each prompt's last row, [B, hidden_size].
        prompts: the pool whose states and pages it writes.
        device: as in `ForwardGraphs`.
    """

    kind = "prefill"

    def __init__(
        self, forward: Callable[[PrefillInputs], Tensor], prompts: PromptPool, device: torch.device
    ) -> None:
        super().__init__(lambda: prompts.generation, device)
        self.forward = forward
        self.prompts = prompts

    @property
    def max_graphs(self) -> int:
        return MAX_PREFILL_GRAPHS

    def variant(self, shape: PrefillShape) -> Hashable:
        return shape.num_prompts, shape.rectangle, shape.goes_on

    def make_buffers(self, shape: PrefillShape) -> PrefillBuffers:
        return PrefillBuffers(shape, self.prompts, self.device)

    def forward_over(self, buffers: PrefillBuffers) -> Callable[[], Tensor]:
        inputs = buffers.inputs()
        return lambda: self.forward(inputs)

    def run(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """The last hidden row of each chunk [B, hidden_size], which the next run overwrites; None: see `find`."""
        found = self.find(shape_for(self._graphs, exact_shape(chunks)))
        if found is None:
            return None
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


def padded_shape(shape: StepShape) -> StepShape:
    """The shape that stands for all with a few rows, requests or ancestors less."""
    rows = shape.num_rows
    step = max(16, (1 << (rows - 1).bit_length()) // 8)
    depth = shape.depth if shape.depth <= EXACT_DEPTH else -(-shape.depth // 8) * 8
    requests = 1 << (shape.num_requests - 1).bit_length()
    return StepShape(-(-rows // step) * step, requests, depth, shape.some_first)
