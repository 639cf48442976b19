"""Which requests run next. Integers and queues only: no tensors, no model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from onela.config import EngineConfig
from onela.engine.active import ActiveRequest
from onela.errors import CapacityError
from onela.state import PromptPool, Records
from onela.state.allocator import ExtentAllocator


@dataclass(frozen=True)
class Batch:
    """The requests of one engine step.

    Attributes:
        prefill: requests whose prompt is run now. decode: requests that take one decode step now.
    """

    prefill: list[ActiveRequest] = field(default_factory=list)
    decode: list[ActiveRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[ActiveRequest]:
        """All of them, prefills first."""
        return self.prefill + self.decode


class Scheduler:
    """First come, first served, within the pools' and the batch's limits.

    A request's need is known when it arrives, so it is admitted only when all of it fits, and then runs to its end.

    Args:
        config: the limits.
        prompts, records: the pools that a request takes places in.
    """

    def __init__(self, config: EngineConfig, prompts: PromptPool, records: Records) -> None:
        self.config = config
        self.prompts = prompts
        self.records = records
        self.rows = ExtentAllocator("beam rows")
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def check(self, request: ActiveRequest) -> None:
        """Refuse a request that could not run even alone. Raises `CapacityError` with the numbers."""
        config = self.config
        needs = (
            ("max_slots", request.num_slots, config.max_slots, "record slots"),
            (
                "max_pages",
                self.prompts.pages_needed(len(request.prompt_token_ids)),
                config.max_pages,
                "KV pages",
            ),
            ("max_batch_rows", request.num_rows, config.max_batch_rows, "beams in a step"),
        )
        for option, need, limit, what in needs:
            if limit is not None and need > limit:
                raise CapacityError(f"the request needs {need} {what}, {option} allows {limit}")

    def add(self, request: ActiveRequest) -> None:
        """Queue a request. Raises `CapacityError` when it can never fit."""
        self.check(request)
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """Admit what fits, in order, and choose the requests of the next step."""
        batch = Batch()
        tokens = 0
        while self.waiting:
            request = self.waiting[0]
            length = len(request.prompt_token_ids)
            if batch.prefill and tokens + length > self.config.max_batch_tokens:
                break
            if not self._fits(request):
                break
            self._admit(self.waiting.popleft())
            batch.prefill.append(request)
            tokens += length
        rows = 0
        for request in self.running:
            if request in batch.prefill:
                continue
            rows += request.beams.width
            if batch.decode and rows > self.config.max_batch_rows:
                break
            batch.decode.append(request)
        return batch

    def release(self, request: ActiveRequest) -> None:
        """Give back all that a running request holds, or take it out of the queue."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request not in self.running:
            return
        self.running.remove(request)
        if request.num_slots:
            self.records.free(request.first_slot, request.num_slots)
        self.rows.free(request.first_row, request.num_rows)
        if request.prompt is not None:
            self.prompts.free(request.prompt)
            request.prompt = None

    def _fits(self, request: ActiveRequest) -> bool:
        return self.records.slots.fits(request.num_slots) and self.prompts.fits(len(request.prompt_token_ids))

    def _admit(self, request: ActiveRequest) -> None:
        request.prompt = self.prompts.allocate(len(request.prompt_token_ids))
        request.first_slot = self.records.allocate(request.num_slots) if request.num_slots else 0
        request.first_row = self.rows.allocate(request.num_rows)
        self.running.append(request)
