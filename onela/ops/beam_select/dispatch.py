"""Which implementation of the selection runs: the kernels, as far as they go, else the reference."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

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
    finite: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`beam_select_ref`: extend every beam by every legal code and keep the best of each request.

    On a GPU the kernels run for levels of at most 32,768 codes. The reference, which runs otherwise and on a CPU, waits
    for the device.

    Args, Returns, Writes, Padding, Numerics, Raises: as in `beam_select_ref`.
    """
    select = beam_select_ref
    if logits.is_cuda:
        from onela.ops.beam_select import kernels

        if logits.shape[1] <= kernels.MAX_CODES:
            select = kernels.beam_select
    return select(
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
        finite=finite,
    )
