"""The trie where the logits are: its arrays as tensors, which beam selection reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from onela.items.trie import ItemTrie


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """An `ItemTrie` as tensors; `ItemTrie.to(device)` makes it. Attributes are as there."""

    codebook_sizes: tuple[int, ...]
    offsets: tuple[torch.Tensor, ...]
    codes: tuple[torch.Tensor, ...]

    @classmethod
    def from_trie(cls, trie: ItemTrie, device: torch.device | str) -> DeviceTrie:
        return cls(
            trie.codebook_sizes,
            tuple(torch.from_numpy(array).to(device) for array in trie.offsets),
            tuple(torch.from_numpy(array).to(device) for array in trie.codes),
        )

    @property
    def num_levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def device(self) -> torch.device:
        return self.codes[0].device

    def num_nodes(self, level: int) -> int:
        return 1 if level == 0 else len(self.codes[level - 1])
