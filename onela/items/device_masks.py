"""The node masks of requests on the device where the beams are."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from onela.items.eligibility import Eligibility, EligibilityIndex, EligibleBase


class MaskPool:
    """One row of bits per request under way; requests that are content with a base share its row.

    Args:
        index: what the eligibilities were compiled by.
        device: where the rows live.
    """

    def __init__(self, index: EligibilityIndex, device: torch.device) -> None:
        self.level_words = index.level_words
        self.device = device
        self.rows = torch.zeros(0, index.level_words[-1], dtype=torch.int32, device=device)
        self._users: dict[int, int] = {}
        self._shared: dict[int, EligibleBase] = {}
        # A base is brought to the device once and lives there for as long as anyone has it here.
        self._bases: weakref.WeakKeyDictionary[EligibleBase, torch.Tensor] = weakref.WeakKeyDictionary()

    @property
    def num_taken(self) -> int:
        """Rows in use."""
        return len(self._users)

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows: more of them lie elsewhere, and what was captured over these is worthless."""
        count = len(self.rows)
        if num_rows > count:
            grown = torch.zeros(num_rows, self.rows.shape[1], dtype=torch.int32, device=self.device)
            grown[:count] = self.rows
            self.rows = grown

    def acquire(self, eligibility: Eligibility) -> int:
        """Write a request's mask into a row and return its number."""
        base = eligibility.base
        shared = base is not None and len(eligibility.places) == 0
        if shared:
            for row, kept in self._shared.items():
                if kept is base:
                    self._users[row] += 1
                    return row
        row = self._free_row()
        target = self.rows[row]
        if base is None:
            target.zero_()
        else:
            target.copy_(self._base(base))
        places, words = eligibility.places, eligibility.words
        if len(places):  # both in one copy
            changes = self._bring(np.concatenate([places.view(np.int32), words.view(np.int32)]))
            target.scatter_(0, changes[: 2 * len(places)].view(torch.int64), changes[2 * len(places) :])
        self._users[row] = 1
        if shared and base is not None:
            self._shared[row] = base
        return row

    def release(self, row: int) -> None:
        """Count one user of a row less; a row without users is free."""
        self._users[row] -= 1
        if not self._users[row]:
            del self._users[row]
            self._shared.pop(row, None)

    def level(self, level: int) -> torch.Tensor:
        """[num_rows, words] int32: bit `e % 32` of word `e // 32` says whether edge `e` of the level may be taken."""
        return self.rows[:, self.level_words[level] : self.level_words[level + 1]]

    def _base(self, base: EligibleBase) -> torch.Tensor:
        found = self._bases.get(base)
        if found is None:
            found = self._bring(base.words.view(np.int32))
            self._bases[base] = found
        return found

    def _bring(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device; the host does not wait until what the device is doing has ended."""
        tensor = torch.from_numpy(array)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _free_row(self) -> int:
        for row in range(len(self.rows)):
            if row not in self._users:
                return row
        count = len(self.rows)
        self.reserve(max(4, count * 3 // 2))
        return count
