"""A request watched level by level, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from onela.engine import AsyncEngine, Request, Result
from onela.engine.active import ActiveRequest
from onela.errors import OneLAError
from onela.items import SidVocabulary
from onela.serve.failures import classify, error_body


class Watch:
    """Runs a request and collects an event per chosen token.

    Args:
        engine: where it runs. request: what is asked. vocabulary: to write codes as the catalogue does.
    """

    def __init__(self, engine: AsyncEngine, request: Request, vocabulary: SidVocabulary) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._vocabulary = vocabulary
        self._started = time.perf_counter()
        self.task = asyncio.ensure_future(engine.generate(request, observer=self._observe))
        self.task.add_done_callback(lambda _: self._events.put_nowait(None))

    async def first(self) -> dict[str, Any] | None:
        """The first event; None when the request ended before. Raises the error that it ended with."""
        event = await self._events.get()
        if event is None:
            await self.task
        return event

    async def events(self, first: dict[str, Any] | None, finish: Any) -> AsyncIterator[str]:
        """The stream's text: `step` events, then `result` (made by `finish`) or `error`."""
        try:
            event = first
            while event is not None:
                yield _event("step", event)
                event = await self._events.get()
            try:
                result: Result = await self.task
                yield _event("result", finish(result))
            except OneLAError as error:
                _, kind, code = classify(error)
                yield _event("error", error_body(str(error), kind, code))
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """End the request if it has not ended."""
        self.task.cancel()
        with contextlib.suppress(OneLAError, asyncio.CancelledError):
            await self.task

    def _observe(self, active: ActiveRequest) -> None:
        """Called on the engine's thread."""
        event = step_event(active, self._vocabulary)
        event["seconds"] = round(time.perf_counter() - self._started, 6)
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever watched
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


def step_event(active: ActiveRequest, vocabulary: SidVocabulary) -> dict[str, Any]:
    """The living beams after a step: last code, index of the parent among the beams before, score."""
    beams = active.beams
    # In one copy: each waits for the device.
    together = torch.stack([beams.codes[:, -1], beams.parent_beams, beams.cum_logprobs.view(torch.int32)])
    codes, parents, bits = together.cpu().numpy()
    scores = bits.view(np.float32)
    alive = np.isfinite(scores)
    return {
        "level": active.level,
        "num_levels": len(active.widths),
        "width": beams.width,
        "codes": vocabulary.codes(active.level - 1, codes[alive]).tolist(),
        "parents": parents[alive].tolist(),
        "cum_logprobs": [round(score, 5) for score in scores[alive].tolist()],
    }


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
