"""Stepping the trie with thousands of beams at once, on the device where the logits are.

No method loops over beams. The results of `children`, `allowed_mask` and `advance` have shapes fixed
by the shapes of their arguments: a CUDA graph can capture them, and they never wait for the device.
`step` is ragged and waits once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from onela.errors import ShapeError

if TYPE_CHECKING:
    from onela.items.trie import ItemTrie


class Candidates(NamedTuple):
    """The legal continuations of a step, in order of (row, code).

    Attributes:
        rows: [C] int64, the row (beam) that a candidate continues.
        codes: [C] int64, its code index.
        nodes: [C] int64, the node of the next level that it leads to.
    """

    rows: torch.Tensor
    codes: torch.Tensor
    nodes: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """An `ItemTrie` as tensors; `ItemTrie.to(device)` makes it. Attributes are as there.

    Everywhere `nodes` is [N] integers, one node of `level` per row; -1 is a padding row, without candidates.
    """

    codebook_sizes: tuple[int, ...]
    offsets: tuple[torch.Tensor, ...]
    codes: tuple[torch.Tensor, ...]
    max_children: tuple[int, ...]

    @classmethod
    def from_trie(cls, trie: ItemTrie, device: torch.device | str) -> DeviceTrie:
        return cls(
            trie.codebook_sizes,
            tuple(torch.from_numpy(array).to(device) for array in trie.offsets),
            tuple(torch.from_numpy(array).to(device) for array in trie.codes),
            trie.max_children,
        )

    @property
    def num_levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def device(self) -> torch.device:
        return self.codes[0].device

    def num_nodes(self, level: int) -> int:
        return 1 if level == 0 else len(self.codes[level - 1])

    def roots(self, num_rows: int) -> torch.Tensor:
        """The node of `num_rows` rows that have no code yet, [num_rows] int64."""
        return torch.zeros(num_rows, dtype=torch.int64, device=self.device)

    def num_children(self, level: int, nodes: torch.Tensor) -> torch.Tensor:
        """How many legal codes continue each row, [N] int64."""
        return self._span(level, nodes)[1]

    def step(self, level: int, nodes: torch.Tensor) -> Candidates:
        """Every legal continuation of every row, ragged."""
        start, count = self._span(level, nodes)
        rows = torch.repeat_interleave(torch.arange(len(nodes), device=self.device), count)
        # Position within its own row, plus where that row's children begin.
        before = torch.cumsum(count, 0) - count
        children = torch.arange(len(rows), device=self.device) + (start - before)[rows]
        return Candidates(rows, self.codes[level][children].long(), children)

    def children(self, level: int, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every legal continuation of every row, padded.

        Returns:
            codes: [N, max_children[level]] int64, ascending, then -1.
            nodes: [N, max_children[level]] int64, the nodes of the next level, then -1.
        """
        start, count = self._span(level, nodes)
        place = torch.arange(self.max_children[level], device=self.device)
        valid = place < count[:, None]
        children = torch.where(valid, start[:, None] + place, 0)
        codes = self.codes[level][children].long()
        return torch.where(valid, codes, -1), torch.where(valid, children, -1)

    def allowed_mask(self, level: int, nodes: torch.Tensor) -> torch.Tensor:
        """True where a code continues a row legally, [N, codebook_sizes[level]] bool."""
        codes, _ = self.children(level, nodes)
        size = self.codebook_sizes[level]
        # Padding goes to one column too many, which is cut off.
        mask = torch.zeros(len(nodes), size + 1, dtype=torch.bool, device=self.device)
        mask.scatter_(1, torch.where(codes < 0, size, codes), True)
        return mask[:, :size].contiguous()

    def advance(self, level: int, nodes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """The node each row reaches by one code.

        Args:
            codes: [N] integers, a code index of `level` per row.
        Returns:
            nodes: [N] int64, nodes of `level + 1`; -1 where the code is illegal or the row is padding.
        """
        if codes.shape != nodes.shape:
            raise ShapeError(f"codes: shape {list(codes.shape)}, expected that of nodes, {list(nodes.shape)}")
        start, count = self._span(level, nodes)
        edges = self.codes[level]
        low, stop = start, start + count
        high = stop
        for _ in range(self.max_children[level].bit_length()):
            middle = (low + high) >> 1
            go_right = (low < high) & (edges[middle.clamp(max=len(edges) - 1)] < codes)
            low, high = torch.where(go_right, middle + 1, low), torch.where(go_right, high, middle)
        found = (low < stop) & (edges[low.clamp(max=len(edges) - 1)] == codes)
        return torch.where(found, low, -1)

    def _span(self, level: int, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First child and number of children of each row, both [N] int64."""
        if not 0 <= level < self.num_levels:
            raise ShapeError(f"level: {level} is out of range, the trie has levels 0..{self.num_levels - 1}")
        if nodes.ndim != 1:
            raise ShapeError(f"nodes: shape {list(nodes.shape)}, expected [N]")
        parent = nodes.long().clamp(min=0)
        start = self.offsets[level][parent].long()
        count = self.offsets[level][parent + 1].long() - start
        return start, torch.where(nodes < 0, 0, count)
