"""Where the beams of all requests lie, from step to step, on the device that selects them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onela.ops.beams import columns

LEAST = 4096
"""Rows that a pool has room for at first: they are small, and growing makes captured graphs worthless."""


@dataclass(frozen=True)
class Beams:
    """The beams of one request, in order of their SIDs: siblings are neighbours, beams that do not live come last.

    Attributes:
        codes: [W, level] int32, code indices so far; PAD in a beam that does not live.
        cum_logprobs: [W] fp32, sum of log-probabilities; -inf in a beam that does not live.
        trie_nodes: [W] int64, node of the item trie; PAD in a beam that does not live.
        parent_beams: [W] int32, beam of the step before that each one extends; PAD in a beam that does not live.
    """

    codes: Tensor
    cum_logprobs: Tensor
    trie_nodes: Tensor
    parent_beams: Tensor

    @property
    def width(self) -> int:
        """Beams, living or not."""
        return self.trie_nodes.shape[0]

    @property
    def alive(self) -> Tensor:
        """[W] bool."""
        return self.trie_nodes >= 0


@dataclass(frozen=True)
class HostBeams:
    """A request's beams on the host.

    Attributes:
        scores: [W] fp32. leaves: [W] int64, trie nodes. codes: [W, level] int32.
        paths: [W, level] fp32, the scores after each code.
        invalid: whether the model produced something that cannot be ranked.
    """

    scores: np.ndarray
    leaves: np.ndarray
    codes: np.ndarray
    paths: np.ndarray
    invalid: bool

    @classmethod
    def of(cls, rows: np.ndarray, level: int, num_levels: int) -> HostBeams:
        """The beams of a request from its rows of a pool, after `level` codes."""
        paths = columns.scores_at(num_levels)
        return cls(
            scores=rows[:, columns.SCORE].view(np.float32),
            leaves=np.ascontiguousarray(rows[:, columns.NODE : columns.NODE + 2]).view(np.int64)[:, 0],
            codes=rows[:, columns.HEAD : columns.HEAD + level],
            paths=rows[:, paths : paths + level].view(np.float32),
            invalid=bool(rows[0, columns.INVALID]),
        )


class BeamPool:
    """A row of numbers per beam (`onela.ops.beams.columns`); a request's beams adjoin, wherever its level is.

    Args:
        num_levels: the most codes of a beam. device: where the rows live.

    `rows` is [P, F] int32. `generation` changes whenever it is replaced by more of them.
    """

    def __init__(self, num_levels: int, device: torch.device) -> None:
        self.num_levels = num_levels
        self.device = device
        self.rows = torch.zeros(0, columns.row_size(num_levels), dtype=torch.int32, device=device)
        self.generation = 0
        self._root: Beams | None = None

    def reserve(self, num_rows: int) -> None:
        """Make room for so many beams."""
        held = len(self.rows)
        if num_rows > held:
            grown = self.rows.new_zeros(max(num_rows, 3 * held // 2, LEAST), self.rows.shape[1])
            grown[:held] = self.rows
            self.rows = grown
            self.generation += 1

    def beams(self, first_row: int, width: int, level: int) -> Beams:
        """Views of a request's beams after `level` codes; what comes next writes over them."""
        if level == 0:
            return self.root
        rows = self.rows[first_row : first_row + width]
        return Beams(
            codes=rows[:, columns.HEAD : columns.HEAD + level],
            cum_logprobs=rows[:, columns.SCORE].view(torch.float32),
            trie_nodes=rows.view(torch.int64)[:, columns.NODE // 2],
            parent_beams=rows[:, columns.PARENT],
        )

    @property
    def root(self) -> Beams:
        """The one beam that stands on a prompt; nobody writes into it."""
        if self._root is None:
            device = self.device
            self._root = Beams(
                codes=torch.empty(1, 0, dtype=torch.int32, device=device),
                cum_logprobs=torch.zeros(1, device=device),
                trie_nodes=torch.zeros(1, dtype=torch.int64, device=device),
                parent_beams=torch.full((1,), -1, dtype=torch.int32, device=device),
            )
        return self._root
