"""Steps that have been handed to the device: the host goes on with the next ones meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onela.engine.active import ActiveRequest
from onela.engine.results import Fetch
from onela.engine.scheduler import Batch

MAX_FLIGHTS = 4
"""Steps under way at a time: a prompt and the decode steps of its SID, while the next prompts are packed."""


@dataclass(frozen=True, eq=False)
class Flight:
    """One step under way.

    Attributes:
        batch: who takes part. finished: those who have chosen their last token. answers: their beams.
        done: the `torch.cuda.Event` behind it; None where the step was done when its last operation returned.
    """

    batch: Batch
    finished: list[ActiveRequest]
    answers: Fetch
    done: Any

    @classmethod
    def begin(cls, batch: Batch, device: torch.device) -> Flight:
        """Everything of the batch's step has been handed to the device, the survivors are chosen."""
        finished = [request for request in batch.requests if request.finished]
        answers = Fetch(finished)
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        return cls(batch, finished, answers, event)

    @property
    def is_done(self) -> bool:
        """Whether the device has done it. Raises what the device has to say about it."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Return when the device has done it. Raises what the device has to say about it."""
        if self.done is not None:
            self.done.synchronize()
