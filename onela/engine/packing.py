"""Packs what the requests of a step hold into the tensors of one forward, with room for padding behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.ops.indexing import to_device
from onela.state import StepInputs

# What the host knows of every row, side by side in one buffer that goes to the device in one piece.
ROWS, SLOTS, ROW_PROMPTS, ROW_DEPTHS, POSITIONS, TOKEN_STARTS, FIRST_ROWS, NUM_FIELDS = range(8)
NO_PARENT = -(1 << 30)
"""Added to a parent's number where the parent is the prompt: the sum is negative, whatever the number."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a decode step, padding included.

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
        depths = [request.tree.depth for request in requests]
        rows = sum(request.beams.width for request in requests)
        return cls(rows, len(requests), max(depths), min(depths) == 0)


class StepBuffers:
    """The tensors of a step of one shape. Fresh ones are all padding.

    Args:
        shape: their sizes. device: where they live.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape = shape
        N, B = shape.num_rows, shape.num_requests
        # Every part begins at a multiple of 16 bytes: kernels are compiled for that once.
        self.stride = _aligned(N)
        self.bounds = NUM_FIELDS * self.stride
        self.places = self.bounds + _aligned(B + 1)
        self.depths = self.places + _aligned(B)
        self.size = self.depths + _aligned(B)
        self.flat = to_device(self.host([], pin=False), device)
        self.token_ids = torch.zeros(N, dtype=torch.int32, device=device)
        self.parent_rows = torch.full((N,), -1, dtype=torch.int32, device=device)
        self.ancestors = torch.full((N, shape.depth), -1, dtype=torch.int32, device=device)

    def inputs(self) -> StepInputs:
        """The step that these buffers describe; the same tensors every time."""
        N, B = self.shape.num_rows, self.shape.num_requests
        fields = [self.flat[i * self.stride : i * self.stride + N] for i in range(NUM_FIELDS)]
        return StepInputs(
            token_ids=self.token_ids,
            positions=fields[POSITIONS],
            slots=fields[SLOTS],
            ancestors=self.ancestors,
            cu_rows=self.flat[self.bounds : self.bounds + B + 1],
            prompts=self.flat[self.places : self.places + B],
            depths=self.flat[self.depths : self.depths + B],
            rows=fields[ROWS],
            parent_rows=self.parent_rows,
            row_prompts=fields[ROW_PROMPTS],
            row_depths=fields[ROW_DEPTHS],
            some_first=self.shape.some_first,
        )

    def host(
        self, requests: Sequence[ActiveRequest], level_starts: Sequence[int] = (), *, pin: bool
    ) -> Tensor:
        """All that the host knows of a step of these requests, as it lies in `flat`."""
        host = torch.empty(self.size, dtype=torch.int32, pin_memory=pin)
        numbers = host.numpy()
        fields = numbers[: self.bounds].reshape(NUM_FIELDS, self.stride)
        fields[:ROW_DEPTHS] = -1
        fields[ROW_DEPTHS:] = 0
        numbers[self.places : self.depths] = -1
        numbers[self.depths :] = 0
        row = 0
        for i, request in enumerate(requests):
            assert request.prompt is not None, "a scheduled request holds a place in the prompt pool"
            width, depth = request.beams.width, request.tree.depth
            rows = slice(row, row + width)
            fields[ROWS, rows] = np.arange(request.first_row, request.first_row + width)
            fields[SLOTS, rows] = np.arange(width) + request.step_start
            fields[ROW_PROMPTS, rows] = request.prompt.index
            fields[ROW_DEPTHS, rows] = depth
            fields[POSITIONS, rows] = request.prompt.num_tokens + depth
            fields[TOKEN_STARTS, rows] = level_starts[request.level - 1]
            fields[FIRST_ROWS, rows] = request.first_row if depth else NO_PARENT
            numbers[self.bounds + i] = row
            numbers[self.places + i] = request.prompt.index
            numbers[self.depths + i] = depth
            row += width
        numbers[self.bounds + len(requests) : self.places] = row
        return host

    def fill(
        self, requests: Sequence[ActiveRequest], token_table: Tensor, level_starts: Sequence[int]
    ) -> None:
        """Describe a step of these requests. Nobody waits for the device.

        Args:
            requests: as many as fit into the shape.
            token_table: the tokens of all levels, in code order, level after level. level_starts: where each begins.
        """
        self.flat.copy_(self.host(requests, level_starts, pin=self.flat.is_cuda), non_blocking=True)
        if not requests:
            return
        N = sum(request.beams.width for request in requests)
        fields = self.flat[: self.bounds].view(NUM_FIELDS, self.stride)[:, :N]
        dead = torch.cat([request.beams.trie_nodes for request in requests]) < 0
        fields[:ROW_DEPTHS].masked_fill_(dead, -1)
        last = torch.cat([request.beams.codes[:, -1] for request in requests]).clamp_(min=0)
        self.token_ids[:N] = token_table.index_select(0, last + fields[TOKEN_STARTS])
        parents = torch.cat([request.beams.parent_beams for request in requests])
        known = (parents + fields[FIRST_ROWS]).clamp_(min=-1)
        self.parent_rows.fill_(-1)
        self.parent_rows[:N] = known.masked_fill_((parents < 0) | dead, -1)
        if not self.shape.depth:
            return
        self.ancestors.fill_(-1)
        row = 0
        for request in requests:
            width, depth = request.beams.width, request.tree.depth
            if depth:
                self.ancestors[row : row + width, :depth] = request.tree.ancestors
            row += width


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
