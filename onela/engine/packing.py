"""What the host knows of a step's requests, in one table that goes to the device in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from onela.decoding import Selection
from onela.engine.active import ActiveRequest
from onela.engine.served import ServedCatalog

# Lines of the part of a decode forward, and of a selection's.
CU_ROWS, FIRST_ROWS, FIRST_SLOTS, PROMPTS, DEPTHS, LENGTHS, TOKEN_STARTS = range(7)
CU_OUT, HIDDEN_STARTS, MASK_ROWS = 3, 4, 5
NUM_LINES = 7
# Beside a selection of every level: those of a second catalogue, or of requests that normalise otherwise.
MORE_SELECTIONS = 4


@dataclass(frozen=True)
class StepShape:
    """Sizes of a decode forward, padding included.

    Attributes:
        num_rows: N. num_requests: B. depth: columns of the ancestors.
        some_first: whether any request may stand at depth 0.
    """

    num_rows: int
    num_requests: int
    depth: int
    some_first: bool

    @classmethod
    def of(cls, requests: Sequence[ActiveRequest]) -> StepShape:
        """The exact sizes of these requests' step."""
        depths = [request.depth for request in requests]
        return cls(sum(request.width for request in requests), len(requests), max(depths), min(depths) == 0)


@dataclass(frozen=True)
class SelectionShape:
    """Which selection it is, and its sizes, padding included.

    Attributes:
        served: whose trie and masks. level: which is chosen. normalizer: of the scores.
        part: the part of the table that describes it. masks: where the masks lie (address and rows); None: nobody has
            one.
        num_requests: B. num_rows: N, beams before. num_out: M, places for survivors.
    """

    served: ServedCatalog
    level: int
    normalizer: str
    part: int
    masks: tuple[int, int] | None
    num_requests: int
    num_rows: int
    num_out: int


class StepTable:
    """The table of one step, always in the same place on the device.

    Args:
        num_levels: of a SID. max_requests: of a step, to begin with. device: where it lives.

    `flat` is [num_parts, NUM_LINES, stride] int32: the part of the decode forward, then those of selections; a line
    holds a number per request, or their bounds. `generation` changes whenever it is replaced by a larger one.
    """

    def __init__(self, num_levels: int, max_requests: int, device: torch.device) -> None:
        self.num_levels = num_levels
        self.device = device
        self.generation = 0
        self.max_requests = max_requests
        self.num_parts = 1 + num_levels + MORE_SELECTIONS
        self._make()

    def _make(self) -> None:
        # Every line begins at a multiple of 16 bytes: kernels are compiled for that once.
        self.stride = -(-(self.max_requests + 1) // 4) * 4
        self.blank = self._host([], [])
        self.flat = self.blank.to(self.device)
        self.blank_flat = self.flat.clone()

    def reserve(self, num_requests: int, num_parts: int) -> None:
        """Make room for so many requests in a step, and so many parts."""
        if num_requests <= self.max_requests and num_parts <= self.num_parts:
            return
        self.max_requests = max(self.max_requests, 1 << (num_requests - 1).bit_length())
        self.num_parts = max(self.num_parts, num_parts)
        self.generation += 1
        self._make()

    def clear(self) -> None:
        """Describe a step of nothing but padding."""
        self.flat.copy_(self.blank_flat)

    def fill(
        self,
        decode: Sequence[ActiveRequest],
        token_starts: Sequence[int],
        selections: Sequence[tuple[SelectionShape, Sequence[ActiveRequest]]],
    ) -> None:
        """Describe a step. Nobody waits for the device.

        Args:
            decode: requests of the decode forward. token_starts: of each, where the tokens of its last level begin.
            selections: who chooses, in which part of the table.
        """
        host = self._host(decode, token_starts)
        parts = host.numpy()
        for shape, requests in selections:
            part, n = parts[shape.part], len(requests)
            for line, values in (
                (CU_ROWS, accumulate((r.width for r in requests), initial=0)),
                (CU_OUT, accumulate((r.widths[r.level] for r in requests), initial=0)),
            ):
                part[line, : n + 1] = list(values)
                part[line, n + 1 :] = part[line, n]
            part[FIRST_ROWS, :n] = [r.first_row for r in requests]
            part[HIDDEN_STARTS, :n] = [r.hidden_row for r in requests]
            # After the last step nobody asks for ancestors.
            part[FIRST_SLOTS, :n] = [r.step_start if r.level and not r.in_last_step else -1 for r in requests]
            part[MASK_ROWS, :n] = [-1 if r.mask_row is None else r.mask_row for r in requests]
        self.flat.copy_(host, non_blocking=True)

    def _host(self, decode: Sequence[ActiveRequest], token_starts: Sequence[int]) -> Tensor:
        """A table on the host, with the part of the decode forward filled in and all others padding."""
        host = torch.empty(
            self.num_parts, NUM_LINES, self.stride, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        numbers = host.numpy()
        numbers[:] = 0
        part, n = numbers[0], len(decode)
        part[PROMPTS] = -1
        numbers[1:, MASK_ROWS] = -1
        if not decode:
            return host
        part[CU_ROWS, : n + 1] = list(accumulate((r.width for r in decode), initial=0))
        part[CU_ROWS, n + 1 :] = part[CU_ROWS, n]
        prompts = [r.prompt for r in decode]
        part[FIRST_ROWS, :n] = [r.first_row for r in decode]
        part[FIRST_SLOTS, :n] = [r.step_start for r in decode]
        part[PROMPTS, :n] = [-1 if prompt is None else prompt.index for prompt in prompts]
        part[DEPTHS, :n] = [r.depth for r in decode]
        part[LENGTHS, :n] = [0 if prompt is None else prompt.num_tokens for prompt in prompts]
        part[TOKEN_STARTS, :n] = token_starts
        return host

    def forward(self, num_requests: int) -> dict[str, Tensor]:
        """The decode forward's part, as `pack_step` takes it."""
        part = self.flat[0]
        names = ("first_rows", "first_slots", "prompts", "depths", "lengths", "token_starts")
        lines = {name: part[line, :num_requests] for line, name in enumerate(names, FIRST_ROWS)}
        return {"cu_rows": part[CU_ROWS, : num_requests + 1], **lines}

    def selection(self, shape: SelectionShape) -> Selection:
        """A selection's part."""
        part, B = self.flat[shape.part], shape.num_requests
        return Selection(
            level=shape.level,
            num_rows=shape.num_rows,
            num_out=shape.num_out,
            cu_rows=part[CU_ROWS, : B + 1],
            cu_out=part[CU_OUT, : B + 1],
            first_rows=part[FIRST_ROWS, :B],
            hidden_starts=part[HIDDEN_STARTS, :B],
            first_slots=part[FIRST_SLOTS, :B],
            mask_rows=part[MASK_ROWS, :B],
        )
