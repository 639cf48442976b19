"""The engine behind an event loop: one worker thread owns it and steps it, anyone may ask."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onela.decoding import BeamParams
from onela.engine.active import ActiveRequest
from onela.engine.engine import Engine
from onela.engine.request import Request, Result, prompt_field
from onela.errors import EngineError, OneLAError, QueueFullError, RequestError, UnavailableError

logger = logging.getLogger(__name__)

# This many failed steps in a row mean that the device or the process is broken, not a request.
MAX_FAILED_STEPS = 3
# An engine without work looks so often whether there is something to get ready for.
IDLE_S = 0.5
# Prompts of at most so many tokens are prepared on the event loop's thread: a third of a millisecond.
MAX_QUICK_TOKENS = 8192


@dataclass(frozen=True)
class StepReport:
    """What one step did, for metrics.

    Attributes:
        seconds: how long it took. prefill_tokens: prompt tokens run. decode_rows: beams that took a decode step.
        ended: requests that ended.
    """

    seconds: float
    prefill_tokens: int
    decode_rows: int
    ended: tuple[ActiveRequest, ...]


@dataclass(eq=False)
class _Ticket:
    """A request between the event loop and the worker thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]
    active: ActiveRequest

    def settle(self, outcome: Result | OneLAError) -> None:
        """Hand the outcome to whoever waits. Called on the worker thread."""
        # A loop that was closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: Result | OneLAError) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Result):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


def _is_quick(request: Request) -> bool:
    """Whether preparing a request takes less time than handing it to another thread and back.

    Tokenizing and compiling filters take their time: neither the loop nor the worker shall wait for it.
    """
    if not isinstance(request, Request):  # which is all that will be said of it
        return True
    filters = (request.filter, request.exclude_item_ids, request.allow_item_ids)
    tokens = request.prompt_token_ids
    # An array of no dimension has no length, nor has what can be gone through once.
    counted = isinstance(tokens, (list, tuple)) or getattr(tokens, "shape", ()) != ()
    if tokens is None or not counted:
        return False
    return len(tokens) <= MAX_QUICK_TOKENS and all(f is None for f in filters)


class AsyncEngine:
    """Runs an `Engine` on a thread of its own.

    Nobody else may step, submit to or cancel on the engine from `start` to `stop`.

    Args:
        engine: the engine.
        on_step: called on the worker thread after each step.
        max_prompt_tokens: longest prompt that is taken, once it is tokens; None: the model's own limit.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepReport], None] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.engine = engine
        self.max_prompt_tokens = max_prompt_tokens
        self.on_step = on_step
        self._wake = threading.Condition()
        self._arrived: list[_Ticket] = []
        self._cancelled: list[ActiveRequest] = []
        self._tickets: dict[int, _Ticket] = {}
        self._thread: threading.Thread | None = None
        self._draining = False
        self._stopped = False
        self._failed_steps = 0

    def start(self) -> None:
        """Start the worker thread."""
        if self._thread is not None:
            raise UnavailableError("the engine has been started already")
        self._thread = threading.Thread(target=self._work, name="onela-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the worker lives and its latest steps did not all fail."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and self._failed_steps < MAX_FAILED_STEPS

    @property
    def accepting(self) -> bool:
        """Whether a request would be taken now, the queue's length apart."""
        return self.healthy and not self._draining

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and run not yet."""
        return len(self._arrived) + len(self.engine.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold places."""
        return len(self.engine.scheduler.running)

    async def generate(
        self,
        request: Request,
        params: BeamParams | None = None,
        *,
        observer: Callable[[ActiveRequest], None] | None = None,
    ) -> Result:
        """Answer one request. Cancelling the task cancels the request, and all it holds is free in the same step.

        `observer` is called on the worker thread each time the request has chosen a token.

        Raises:
            RequestError, CapacityError: nothing can be done for this request.
            QueueFullError: `max_waiting` requests wait already. UnavailableError: the engine drains or is broken.
            DeadlineError, NumericsError, EngineError: how it ended.
        """
        self._check_open()
        try:
            if _is_quick(request):
                active = self.engine.prepare(request, params)
            else:
                active = await asyncio.to_thread(self.engine.prepare, request, params)
        except OneLAError:
            raise
        except Exception as error:  # of a tokenizer's, say: it shall look like every other failure
            raise EngineError(f"the request cannot be read: {type(error).__name__}: {error}") from error
        length = len(active.prompt_token_ids)
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            raise RequestError(
                prompt_field(request), f"at most {self.max_prompt_tokens} tokens (got {length})"
            )
        if isinstance(active.outcome, Result):
            return active.outcome
        active.observer = observer
        loop = asyncio.get_running_loop()
        ticket = _Ticket(loop, loop.create_future(), active)
        with self._wake:
            self._check_open()
            self._arrived.append(ticket)
            self._wake.notify()
        try:
            return await ticket.future
        except asyncio.CancelledError:
            with self._wake:
                self._cancelled.append(active)
                self._wake.notify()
            raise

    async def stop(self, *, drain_s: float = 30.0) -> None:
        """Refuse new requests, let those under way end for at most `drain_s` seconds, then stop the worker."""
        with self._wake:
            self._draining = True
            self._wake.notify()
        limit = time.monotonic() + drain_s
        while self._busy and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def _busy(self) -> bool:
        alive = self._thread is not None and self._thread.is_alive()
        with self._wake:
            return alive and bool(self._arrived or self._tickets)

    def _check_open(self) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down")
        if not self.healthy:
            raise UnavailableError("the engine is not running")
        limit = self.engine.config.max_waiting
        if self.num_waiting >= limit:
            raise QueueFullError(
                f"{self.num_waiting} requests are waiting, max_waiting allows {limit}",
                retry_after_s=self.engine.scheduler.retry_after(),
            )

    # ---- the worker thread

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:  # nobody else is there to hear of it, and nobody may wait for an answer for ever
            logger.exception("the engine's thread has ended")
        with self._wake:
            self._draining = True
        self._abandon(UnavailableError("the server has shut down"))

    def _serve(self) -> None:
        device = self.engine.device
        if device.type == "cuda":
            # Kernels are launched on the thread's current device, and every thread begins on the first one.
            torch.cuda.set_device(device)
        while True:
            with self._wake:
                while not (self._arrived or self._cancelled or self._stopped or self._tickets):
                    if not self._wake.wait(IDLE_S):
                        break
                if self._stopped:
                    return
                arrived, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, []
                # Under the lock a ticket is in one of the two lists at any time, so that draining sees it.
                self._tickets.update((id(ticket.active), ticket) for ticket in arrived)
            for ticket in arrived:
                self._add(ticket)
            for active in cancelled:
                if self.engine.cancel(active):
                    self._settle(active)
            if self.engine.scheduler.has_work:
                self._step()
            elif not arrived:
                self._use_idle_time()

    def _use_idle_time(self) -> None:
        """Get ready for a catalogue that has been loaded, as long as nobody comes."""
        try:
            while self.engine.get_ready() and not self._arrived:
                pass
        except Exception:  # it will be tried again when somebody needs it
            logger.exception("what a catalogue needs could not be captured ahead")

    def _add(self, ticket: _Ticket) -> None:
        try:
            self.engine.scheduler.add(ticket.active)
        except OneLAError as error:
            ticket.active.outcome = error
            self._settle(ticket.active)

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            ended = self.engine.step()
        except Exception as error:  # the engine's own bookkeeping is broken: nothing it holds can be trusted
            wrapped = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._failed_steps += 1
            self._abandon(wrapped)
            return
        failed = any(isinstance(request.outcome, EngineError) for request in ended)
        self._failed_steps = self._failed_steps + 1 if failed else 0
        for request in ended:
            self._settle(request)
        self._report(time.perf_counter() - started, ended)

    def _report(self, seconds: float, ended: list[ActiveRequest]) -> None:
        if self.on_step is None:
            return
        scheduler = self.engine.scheduler
        report = StepReport(seconds, scheduler.scheduled_tokens, scheduler.scheduled_rows, tuple(ended))
        try:
            self.on_step(report)
        except Exception:  # whoever counts steps must not be able to stop them
            logger.exception("the observer of steps failed")

    def _settle(self, request: ActiveRequest) -> None:
        ticket = self._tickets.pop(id(request), None)
        if ticket is not None and request.outcome is not None:
            ticket.settle(request.outcome)

    def _abandon(self, error: OneLAError) -> None:
        """End everyone who is still here."""
        with self._wake:
            self._tickets.update((id(ticket.active), ticket) for ticket in self._arrived)
            self._arrived = []
        for ticket in list(self._tickets.values()):
            with contextlib.suppress(Exception):
                self.engine.cancel(ticket.active)
            ticket.active.outcome = error
            self._settle(ticket.active)
