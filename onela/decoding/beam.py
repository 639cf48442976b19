"""Beam search over semantic IDs: which continuations survive, for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from onela.items import DeviceTrie
from onela.ops.beam_select import beam_select
from onela.ops.indexing import device_tensor


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

    @classmethod
    def root(cls, device: torch.device) -> Beams:
        """The one beam that stands on the prompt."""
        return cls(
            codes=torch.empty(1, 0, dtype=torch.int32, device=device),
            cum_logprobs=torch.zeros(1, device=device),
            trie_nodes=torch.zeros(1, dtype=torch.int64, device=device),
            parent_beams=torch.full((1,), -1, dtype=torch.int32, device=device),
        )

    @property
    def width(self) -> int:
        """Beams, living or not."""
        return self.codes.shape[0]

    @property
    def alive(self) -> Tensor:
        """[W] bool."""
        return self.trie_nodes >= 0


class BeamSearch:
    """Selects the survivors of a step.

    Args:
        trie: legal SIDs; None: every combination of codes is legal.
    """

    def __init__(self, trie: DeviceTrie | None) -> None:
        self.trie = trie

    def step(
        self,
        level: int,
        logits: Tensor,
        beams: Sequence[Beams],
        widths: Sequence[int],
        *,
        normalizer: str = "level",
        log_normalizer: Tensor | None = None,
        allowed: Tensor | None = None,
        allowed_rows: Sequence[int] | None = None,
        finite: Tensor | None = None,
    ) -> list[Beams]:
        """Extend the beams of several requests that stand before the same level.

        Args:
            level: which level's codes the columns of `logits` are.
            logits: [N, C] fp32, rows of the requests one after the other.
            beams: the requests' beams, N in all. widths: survivors to keep of each request.
            normalizer: "level", "allowed", or "vocabulary" with `log_normalizer` [N] given.
            allowed: [F, words] int32, masks over the trie's edges of this level, 32 to a word. allowed_rows: the mask
                of each request, -1 for a request without one.
            finite: [N] bool, written as `beam_select_ref` says: whether a row's logits can be used. None: not asked.
        Returns:
            The survivors of each request, `width` places each; fewer live where fewer are legal.
        """
        device = logits.device
        cu_rows = _boundaries([b.width for b in beams], device)
        cu_out = _boundaries(widths, device)
        parents, codes, cum_logprobs, nodes = beam_select(
            logits,
            cum_logprobs=torch.cat([b.cum_logprobs for b in beams]),
            cu_rows=cu_rows,
            cu_out=cu_out,
            trie_nodes=torch.cat([b.trie_nodes for b in beams]),
            child_offsets=None if self.trie is None else self.trie.offsets[level],
            child_codes=None if self.trie is None else self.trie.codes[level],
            child_allowed=allowed,
            allowed_rows=None if allowed_rows is None else device_tensor(allowed_rows, torch.int64, device),
            normalizer=normalizer if log_normalizer is None else log_normalizer,  # type: ignore[arg-type]
            num_out=sum(widths),
            finite=finite,
        )
        # All requests at once: what is done for each of them alone, a GPU waits for.
        missing = parents < 0
        local = parents
        if len(beams) > 1:
            counts = device_tensor(widths, torch.int64, device)
            first_rows = torch.repeat_interleave(cu_rows[:-1], counts, output_size=sum(widths))
            local = (parents - first_rows).masked_fill_(missing, -1)
        histories = codes[:, None]
        if level:
            before = beams[0].codes if len(beams) == 1 else torch.cat([b.codes for b in beams])
            histories = torch.cat([before.index_select(0, parents.clamp(min=0)), histories], dim=1)
            histories = histories.masked_fill_(missing[:, None], -1)
        parts = (part.split(list(widths)) for part in (histories, cum_logprobs, nodes, local))
        return [Beams(*part) for part in zip(*parts)]

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


def _boundaries(sizes: Sequence[int], device: torch.device) -> Tensor:
    bounds = list(accumulate(sizes, initial=0))
    return device_tensor(bounds, torch.int32, device)
