"""The ancestry index: which records a beam consists of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onela.ops.indexing import PAD


@dataclass(frozen=True)
class BeamTree:
    """Ancestors of the live beams of one request.

    `h_t(b, j) = h_{t-1}(parent_t(b), j)` for `j < t - 1`, and `h_t(b, t - 1)` is the slot that the parent
    wrote. Selection prunes, reorders and fans out; all it changes is this table.

    Attributes:
        ancestors: [W, depth] int32 slots, oldest first; PAD in a beam that does not live.
    """

    ancestors: Tensor

    @classmethod
    def root(cls, width: int, device: torch.device) -> BeamTree:
        """`width` beams that have written nothing yet."""
        return cls(torch.empty(width, 0, dtype=torch.int32, device=device))

    @property
    def width(self) -> int:
        """Beams, living or not."""
        return self.ancestors.shape[0]

    @property
    def depth(self) -> int:
        """Steps taken since the prompt."""
        return self.ancestors.shape[1]

    def advance(self, parent_beams: Tensor, first_slot: int) -> BeamTree:
        """The tree after a selection.

        Args:
            parent_beams: [W'] int32 or int64, index of the beam that each survivor extends; PAD where there is none.
            first_slot: where this tree's first beam has just written; the others' slots follow in their order.
        Returns:
            A tree of W' beams, one step deeper.
        """
        written = (parent_beams + first_slot)[:, None].to(torch.int32)
        if self.depth:
            written = torch.cat([self.ancestors.index_select(0, parent_beams.clamp(min=0)), written], dim=1)
        return BeamTree(written.masked_fill_((parent_beams < 0)[:, None], PAD))
