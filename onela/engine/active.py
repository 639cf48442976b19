"""A request on its way through the engine: its places in the pools and its beams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onela.decoding import BeamParams, BeamPool, Beams
from onela.engine.request import Request, Result
from onela.engine.served import ServedCatalog
from onela.errors import OneLAError
from onela.items import Eligibility
from onela.state import PromptState
from onela.state.records import last_step_rows, own_slots


@dataclass(eq=False)
class ActiveRequest:
    """Host-side bookkeeping of one request.

    Attributes:
        request, params: what was asked. prompt_token_ids: [length] int32, numbers that lie side by side: lists of
            thousands are slow to copy.
        asked: items to return. widths: beams after each step, impossible ones left out.
        prompt: its place in the prompt pool. first_slot, first_row: its extents of record slots and of beam rows.
        spare_slot: where the records of its last step go, in the batch that runs it.
        served: the catalogue that it began with. eligibility: what it may get; None: everything.
        mask_row: its row of the served catalogue's masks, once it has one.
        pool: where its beams lie, from `first_row` on. level: tokens written so far, and the level that is chosen next.
        hidden_row: where the runner keeps the first of the hidden rows that the next token is chosen from.
        prefix_digests: of its prefixes that may be in the prompt cache. stops: lengths after which its prompt
            state is to be kept. kept: digests of those that were. cached_tokens: tokens found in the cache.
        arrived_at, deadline: seconds on the scheduler's clock; deadline None: as long as it takes.
        order: place in the order of arrival. overtaken: how many later arrivals have been admitted before it.
        admitted_at: when it left the queue. chosen_at: when each token was chosen, in order.
        observer: called by the engine each time a token has been chosen.
        outcome: how the request ended; None while it has not. Set once, by the engine.
    """

    request: Request
    params: BeamParams
    prompt_token_ids: np.ndarray[Any, np.dtype[np.int32]]
    asked: int
    widths: tuple[int, ...]
    pool: BeamPool
    served: ServedCatalog
    eligibility: Eligibility | None = None
    mask_row: int | None = None
    prompt: PromptState | None = None
    first_slot: int = 0
    spare_slot: int = 0
    first_row: int = 0
    level: int = 0
    hidden_row: int = 0
    prefix_digests: list[bytes] = field(default_factory=list)
    stops: tuple[int, ...] = ()
    kept: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    arrived_at: float = 0.0
    deadline: float | None = None
    order: int = -1
    overtaken: int = 0
    admitted_at: float | None = None
    chosen_at: list[float] = field(default_factory=list)
    observer: Callable[[ActiveRequest], None] | None = None
    outcome: Result | OneLAError | None = None

    @property
    def width(self) -> int:
        """Beams, living or not; one before the first token: the prompt."""
        return self.widths[self.level - 1] if self.level else 1

    @property
    def depth(self) -> int:
        """Ancestors of each beam."""
        return max(self.level - 1, 0)

    @property
    def beams(self) -> Beams:
        """The beams as they are now, in views that the next step writes over."""
        return self.pool.beams(self.first_row, self.width, self.level)

    @property
    def finished(self) -> bool:
        """Whether the last token has been chosen."""
        return self.level == len(self.widths)

    @property
    def in_prefill(self) -> bool:
        """Whether part of the prompt has still to be run."""
        return self.prompt is None or self.prompt.num_tokens < len(self.prompt_token_ids)

    @property
    def num_slots(self) -> int:
        """Record slots that the request needs (`own_slots`)."""
        return own_slots(self.widths)

    @property
    def num_spare(self) -> int:
        """Beams of the last decode step, whose records nobody reads (`last_step_rows`)."""
        return last_step_rows(self.widths)

    @property
    def in_last_step(self) -> bool:
        """Whether the decode step that comes next is the last one."""
        return self.level == len(self.widths) - 1

    @property
    def num_rows(self) -> int:
        """Beam rows that the request needs."""
        return max(self.widths)

    @property
    def step_start(self) -> int:
        """Slot of the first of the current beams' records; they adjoin."""
        if self.in_last_step:
            return self.spare_slot
        return self.first_slot + sum(self.widths[: self.level - 1])

    def advance(self) -> None:
        """Count the token that has been chosen."""
        self.level += 1
