"""Which implementation of the selection runs: the kernels, as far as they go, else the reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops.beam_select.mask import mask_logits
from onela.ops.beam_select.reference import beam_select_ref


def beam_select(
    logits: Tensor,
    *,
    cum_logprobs: Tensor,
    cu_rows: Tensor,
    cu_out: Tensor,
    trie_nodes: Tensor,
    child_offsets: Tensor | None = None,
    child_codes: Tensor | None = None,
    child_allowed: Tensor | None = None,
    allowed_rows: Tensor | None = None,
    normalizer: Literal["level", "allowed"] | Tensor = "level",
    num_out: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`beam_select_ref`: extend every beam by every legal code and keep the best of each request.

    On a GPU the kernels run for levels of at most 32,768 codes; masks over the edges are taken out of the logits
    before. The reference, which runs otherwise and on a CPU, waits for the device.

    Args, Returns, Padding, Numerics, Raises: as in `beam_select_ref`.
    """
    if (child_allowed is None) != (allowed_rows is None):
        raise ShapeError("child_allowed and allowed_rows: give both or neither")
    if logits.is_cuda:
        from onela.ops.beam_select.kernels import MAX_CODES
        from onela.ops.beam_select.kernels import beam_select as beam_select_triton

        if logits.shape[1] <= MAX_CODES:
            if child_allowed is not None and allowed_rows is not None:
                if not isinstance(normalizer, Tensor) and normalizer == "level":
                    normalizer = logits.to(torch.float32).logsumexp(-1)  # over all codes, forbidden ones too
                logits = mask_logits(
                    logits,
                    cu_rows=cu_rows,
                    trie_nodes=trie_nodes,
                    child_offsets=child_offsets,
                    child_codes=child_codes,
                    child_allowed=child_allowed,
                    allowed_rows=allowed_rows,
                )
            return beam_select_triton(
                logits,
                cum_logprobs=cum_logprobs,
                cu_rows=cu_rows,
                cu_out=cu_out,
                trie_nodes=trie_nodes,
                child_offsets=child_offsets,
                child_codes=child_codes,
                normalizer=normalizer,
                num_out=num_out,
            )
    return beam_select_ref(
        logits,
        cum_logprobs=cum_logprobs,
        cu_rows=cu_rows,
        cu_out=cu_out,
        trie_nodes=trie_nodes,
        child_offsets=child_offsets,
        child_codes=child_codes,
        child_allowed=child_allowed,
        allowed_rows=allowed_rows,
        normalizer=normalizer,
        num_out=num_out,
    )
