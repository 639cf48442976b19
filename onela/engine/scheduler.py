"""Which requests run next. Integers and queues only: no tensors, no model."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from onela.config import EngineConfig
from onela.engine.active import ActiveRequest
from onela.engine.prompt_cache import PromptCache
from onela.errors import CapacityError, QueueFullError
from onela.state import PromptPool, PromptState, Records
from onela.state.allocator import ExtentAllocator
from onela.state.records import spare_needed

MAX_PREFILL_PROMPTS = 16
"""Prompts of one prefill forward: more of them cost as much as in two, and a captured forward has room for so many."""


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `start : end` of a request, run in one step.

    Attributes:
        request: whose prompt. start: tokens that its prompt state holds already. end: tokens it holds afterwards.
    """

    request: ActiveRequest
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the prompt ends here, so that the first token can be chosen."""
        return self.end == len(self.request.prompt_token_ids)


@dataclass(frozen=True)
class Batch:
    """The work of one engine step.

    Attributes:
        prefill: pieces of prompts that are run now. decode: requests that take one decode step now.
    """

    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[ActiveRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[ActiveRequest]:
        """Those that choose a token in this step: prompts that end now, then decodes."""
        return [chunk.request for chunk in self.prefill if chunk.completes] + self.decode

    @property
    def members(self) -> list[ActiveRequest]:
        """Everyone who takes part."""
        return [chunk.request for chunk in self.prefill] + self.decode


class Scheduler:
    """Continuous batching within the pools' and the batch's limits.

    A request's need is known when it arrives, so it is admitted only when all of it fits, and then runs to its end.
    Who is admitted next: the higher `priority`, then the earlier deadline, then the earlier arrival; but whoever
    has been passed `max_overtaken` times by later arrivals comes first. Nobody passes the one who is next, even
    if there is room for a smaller request: so whoever waits is admitted after a bounded number of others. Under
    `rounding="transformers"` a request runs alone.

    Args:
        config: the limits.
        prompts, records: the pools that a request takes places in.
        cache: prompt states to begin with; None: every prompt is run from its first token.
        clock: seconds, only ever compared with each other.

    `scheduled_tokens` and `scheduled_rows` are the prompt tokens and the beams of the latest batch. `failed` are
    requests that could not be given their places, and why; they hold none, and whoever ends them empties the list.
    """

    def __init__(
        self,
        config: EngineConfig,
        prompts: PromptPool,
        records: Records,
        *,
        cache: PromptCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.records = records
        self.cache = cache
        self.clock = clock
        # What else is in a batch decides in which order its matrix products sum.
        self.alone = config.rounding == "transformers"
        self.rows = ExtentAllocator("beam rows")
        self.waiting: list[ActiveRequest] = []
        self.running: list[ActiveRequest] = []
        self.failed: list[tuple[ActiveRequest, Exception]] = []
        self.scheduled_tokens = 0
        self.scheduled_rows = 0
        self._arrivals = 0
        self._departures: deque[float] = deque(maxlen=64)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def is_full(self) -> bool:
        """Whether `add` would refuse for want of room in the queue."""
        return len(self.waiting) >= self.config.max_waiting

    def check(self, request: ActiveRequest) -> None:
        """Refuse a request that could not run even alone. Raises `CapacityError` with the numbers."""
        config = self.config
        pages = self.prompts.pages_needed(len(request.prompt_token_ids))
        needs = (
            ("max_slots", request.num_slots + request.num_spare, config.max_slots, "record slots"),
            ("max_pages", pages, config.max_pages, "KV pages"),
            ("max_batch_rows", request.num_rows, config.max_batch_rows, "beams in a step"),
        )
        for option, need, limit, what in needs:
            if limit is not None and need > limit:
                raise CapacityError(f"the request needs {need} {what}, {option} allows {limit}")

    def add(self, request: ActiveRequest) -> None:
        """Queue a request.

        Raises:
            CapacityError: it can never fit.
            QueueFullError: `max_waiting` requests wait already.
        """
        self.check(request)
        if self.is_full:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, max_waiting allows {self.config.max_waiting}",
                retry_after_s=self.retry_after(),
            )
        request.order = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def retry_after(self) -> float:
        """Seconds in which the present queue is likely to be through, by the pace of the latest requests."""
        if len(self._departures) < 2:
            return 1.0
        pace = (self._departures[-1] - self._departures[0]) / (len(self._departures) - 1)
        return min(60.0, max(1.0, math.ceil(pace * len(self.waiting))))

    def expired(self) -> list[ActiveRequest]:
        """Requests whose deadline has passed, waiting or running. They keep their places until `release`."""
        now = self.clock()
        return [r for r in [*self.waiting, *self.running] if r.deadline is not None and r.deadline <= now]

    def schedule(self, *, admit: bool = True) -> Batch:
        """Choose the work of the next step: decodes, pieces of prompts under way, then whoever is next in the queue.

        Args:
            admit: whether anyone may leave the queue now.
        """
        batch = Batch()
        rows = 0
        for request in self.running:
            if request.in_prefill or request.finished:
                continue
            rows += request.width
            if not batch.decode or rows <= self.config.max_batch_rows:
                batch.decode.append(request)
        allowed = self._prefill_budget(batch)
        budget = allowed
        for request in self.running:
            if budget and request.in_prefill and len(batch.prefill) < MAX_PREFILL_PROMPTS:
                budget = self._take_chunk(batch, request, budget)
        while admit and budget and self.waiting and len(batch.prefill) < MAX_PREFILL_PROMPTS:
            if self.running and self.alone:
                break
            request = self._next()
            if batch.prefill and budget < self._new_tokens(request) <= self.config.max_batch_tokens:
                break  # the next step has room for all of it: two pieces cost more than one
            try:
                if not self._admit(request):
                    break
            except Exception as error:  # no memory for it, say: that is its trouble alone
                self.waiting.remove(request)
                self.failed.append((request, error))
                continue
            budget = self._take_chunk(batch, request, budget)
        self.scheduled_tokens = allowed - budget
        self.scheduled_rows = sum(request.width for request in batch.decode)
        return batch

    def keep(self, batch: Batch) -> None:
        """Hand the prompt states that stand at a boundary now to the cache."""
        if self.cache is None:
            return
        for chunk in batch.prefill:
            if chunk.end in chunk.request.stops:
                self.cache.store(chunk.request)

    def release(self, request: ActiveRequest) -> None:
        """Give back all that a running request holds, or take it out of the queue."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request not in self.running:
            return
        self.running.remove(request)
        self._departures.append(self.clock())
        if request.num_slots:
            self.records.free(request.first_slot, request.num_slots)
        if not self.running:
            self.records.free_spare()
        self.rows.free(request.first_row, request.num_rows)
        if request.prompt is not None:
            self.prompts.free(request.prompt)
            request.prompt = None

    def _prefill_budget(self, batch: Batch) -> int:
        """Prompt tokens that may run beside the decodes of a batch."""
        beside = self.config.max_tokens_beside_decode
        if not batch.decode or beside is None:
            return self.config.max_batch_tokens
        return min(beside, self.config.max_batch_tokens)

    def _new_tokens(self, request: ActiveRequest) -> int:
        """Prompt tokens of a waiting request that have to be run, as things stand."""
        known = 0 if self.cache is None else self.cache.known_tokens(request)
        return len(request.prompt_token_ids) - known

    def _next(self) -> ActiveRequest:
        """Whose turn it is among those who wait."""
        passed = [r for r in self.waiting if r.overtaken >= self.config.max_overtaken]
        if passed:
            return min(passed, key=lambda r: r.order)
        return min(
            self.waiting,
            key=lambda r: (-r.request.priority, math.inf if r.deadline is None else r.deadline, r.order),
        )

    def _take_chunk(self, batch: Batch, request: ActiveRequest, budget: int) -> int:
        """Give a prompt as much of the token budget as it can use; returns what is left."""
        assert request.prompt is not None
        start = request.prompt.num_tokens
        ends = [len(request.prompt_token_ids), *(stop for stop in request.stops if stop > start)]
        end = min(start + budget, *ends)
        if end > start:
            batch.prefill.append(PrefillChunk(request, start, end))
        return budget - (end - start)

    def _admit(self, request: ActiveRequest) -> bool:
        """Give a request all it needs, if there is room for it now."""
        num_spare = self._spare_needed(request)
        if not self.records.fits(request.num_slots, num_spare):
            return False
        request.prompt = self._allocate_prompt(request)
        if request.prompt is None:
            return False
        try:
            request.first_slot = self.records.admit(request.num_slots, num_spare)
        except BaseException:
            self.prompts.free(request.prompt)
            request.prompt = None
            raise
        request.first_row = self.rows.allocate(request.num_rows)
        request.admitted_at = self.clock()
        self.waiting.remove(request)
        for other in self.waiting:
            other.overtaken += other.order < request.order
        self.running.append(request)
        return True

    def _spare_needed(self, request: ActiveRequest) -> int:
        """Rows that can be in their last step in one forward, with this request admitted: as many as fit into one."""
        widths = [r.num_spare for r in [*self.running, request]]
        return spare_needed(sum(widths), max(widths), self.config.max_batch_rows)

    def _allocate_prompt(self, request: ActiveRequest) -> PromptState | None:
        if self.cache is not None:
            return self.cache.allocate(request)
        length = len(request.prompt_token_ids)
        return self.prompts.allocate(length) if self.prompts.fits(length) else None
