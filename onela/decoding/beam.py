"""Beam search over semantic IDs: which continuations survive, for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from onela.decoding.pool import BeamPool
from onela.items import DeviceTrie
from onela.ops.beam_select import beam_select
from onela.ops.beams import advance_beams, pack_beams
from onela.ops.indexing import device_tensor


@dataclass(frozen=True)
class Selection:
    """What the host knows of one selection, of requests that stand before the same level.

    Attributes:
        level: which is chosen. num_rows: N, rows that it is chosen from, and num_out: M, places for survivors, both
            with padding.
        cu_rows: [B+1] int32, rows of each request. cu_out: [B+1] int32, its survivors.
        first_rows: [B] int32, where its beams lie in the pool. hidden_starts: [B] int32, the hidden row of its first
            beam.
        first_slots: [B] int32, the slot that its first beam has just written; PAD where nobody asks for it any more.
        mask_rows: [B] int32, its row of the masks over the trie's edges; PAD: it has none.
    """

    level: int
    num_rows: int
    num_out: int
    cu_rows: Tensor
    cu_out: Tensor
    first_rows: Tensor
    hidden_starts: Tensor
    first_slots: Tensor
    mask_rows: Tensor

    @classmethod
    def of(
        cls,
        level: int,
        rows: Sequence[int],
        widths: Sequence[int],
        first_rows: Sequence[int],
        device: torch.device,
        *,
        mask_rows: Sequence[int] | None = None,
    ) -> Selection:
        """A selection whose hidden rows adjoin, and that notes no slots.

        Args:
            rows, widths, first_rows: of each request, beams before and after, and where they lie in the pool.
        """

        def tensor(values: Sequence[int]) -> Tensor:
            return device_tensor(values, torch.int32, device)

        bounds = list(accumulate(rows, initial=0))
        none = [-1] * len(rows)
        return cls(
            level=level,
            num_rows=bounds[-1],
            num_out=sum(widths),
            cu_rows=tensor(bounds),
            cu_out=tensor(list(accumulate(widths, initial=0))),
            first_rows=tensor(first_rows),
            hidden_starts=tensor(bounds[:-1]),
            first_slots=tensor(none),
            mask_rows=tensor(none if mask_rows is None else mask_rows),
        )


@dataclass(frozen=True)
class PackedBeams:
    """The beams that a selection chooses from, side by side; see `pack_beams_ref`.

    Attributes:
        cum_logprobs: [N] fp32. trie_nodes: [N] int64. hidden_rows: [N] int64, where their hidden rows lie.
        rows: [N, F] int32, all that is known of them.
    """

    cum_logprobs: Tensor
    trie_nodes: Tensor
    hidden_rows: Tensor
    rows: Tensor

    @classmethod
    def of(cls, pool: BeamPool, selection: Selection) -> PackedBeams:
        """Those of a selection."""
        return cls(
            *pack_beams(
                pool.rows,
                cu_rows=selection.cu_rows,
                first_rows=selection.first_rows,
                hidden_starts=selection.hidden_starts,
                num_rows=selection.num_rows,
                level=selection.level,
                num_levels=pool.num_levels,
            )
        )


class BeamSearch:
    """Selects the survivors of a step.

    Args:
        trie: legal SIDs; None: every combination of codes is legal.
    """

    def __init__(self, trie: DeviceTrie | None) -> None:
        self.trie = trie

    def step(
        self,
        pool: BeamPool,
        selection: Selection,
        beams: PackedBeams,
        logits: Tensor,
        *,
        normalizer: Literal["level", "allowed"] | Tensor = "level",
        allowed: Tensor | None = None,
    ) -> None:
        """Extend the beams of several requests that stand before the same level; the survivors take their places.

        A request of whose living beams one has logits that cannot be ranked is marked in its first row. Nothing waits
        for a GPU.

        Args:
            pool: where the beams lie. selection, beams: who takes part; `beams` was packed from the pool just before.
            logits: [N, C], one column per code of the level.
            normalizer: "level", "allowed", or log-normalizers [N].
            allowed: [F, words] int32, masks over the trie's edges of this level, 32 to a word; None: no request of the
                selection has one.
        """
        level = selection.level
        # On a GPU the selection tells it of what it reads; elsewhere a pass of its own costs less.
        finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device) if logits.is_cuda else None
        usable = finite
        if usable is None:
            lowest, highest = logits.aminmax(dim=-1)
            usable = highest - lowest < float("inf")
        chosen = beam_select(
            logits,
            cum_logprobs=beams.cum_logprobs,
            cu_rows=selection.cu_rows,
            cu_out=selection.cu_out,
            trie_nodes=beams.trie_nodes,
            child_offsets=None if self.trie is None else self.trie.offsets[level],
            child_codes=None if self.trie is None else self.trie.codes[level],
            child_allowed=allowed,
            allowed_rows=None if allowed is None else selection.mask_rows,
            normalizer=normalizer,
            num_out=selection.num_out,
            finite=finite,
        )
        if isinstance(normalizer, Tensor):  # the logits of tokens that are no codes
            usable &= torch.isfinite(normalizer)
        advance_beams(
            pool.rows,
            beams.rows,
            *chosen,
            trie_nodes=beams.trie_nodes,
            finite=usable,
            cu_rows=selection.cu_rows,
            cu_out=selection.cu_out,
            first_rows=selection.first_rows,
            first_slots=selection.first_slots,
            level=level,
            num_levels=pool.num_levels,
        )

    def limit_widths(
        self, widths: Sequence[int], codebook_sizes: Sequence[int], num_nodes: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Widths with places that no beam can ever fill left out.

        A step cannot have more beams than its parents have children, nor than the trie has nodes on that level, or
        than `num_nodes` of them are left by a filter.
        """
        limited = []
        previous = 1
        for level, width in enumerate(widths):
            possible = previous * codebook_sizes[level]
            if self.trie is not None:
                possible = min(possible, self.trie.num_nodes(level + 1))
            if num_nodes is not None:
                possible = min(possible, num_nodes[level])
            previous = min(width, possible)
            limited.append(previous)
        return tuple(limited)
