"""Which implementation runs: the kernels on a GPU, else the references."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from onela.ops.beams import reference


def _on(beams: Tensor) -> ModuleType | None:
    if not beams.is_cuda:
        return None
    from onela.ops.beams import kernels

    return kernels


def pack_step(
    beams: Tensor,
    *,
    token_table: Tensor,
    cu_rows: Tensor,
    first_rows: Tensor,
    first_slots: Tensor,
    prompts: Tensor,
    depths: Tensor,
    lengths: Tensor,
    token_starts: Tensor,
    num_rows: int,
    depth: int,
    num_levels: int,
) -> tuple[Tensor, Tensor]:
    """`pack_step_ref`: what a decode forward has to know of each of its rows, for several requests at any depths.

    Args, Returns, Padding, Raises: as in `pack_step_ref`.
    """
    kernels = _on(beams)
    pack = reference.pack_step_ref if kernels is None else kernels.pack_step
    return pack(
        beams,
        token_table=token_table,
        cu_rows=cu_rows,
        first_rows=first_rows,
        first_slots=first_slots,
        prompts=prompts,
        depths=depths,
        lengths=lengths,
        token_starts=token_starts,
        num_rows=num_rows,
        depth=depth,
        num_levels=num_levels,
    )


def pack_beams(
    beams: Tensor,
    *,
    cu_rows: Tensor,
    first_rows: Tensor,
    hidden_starts: Tensor,
    num_rows: int,
    level: int,
    num_levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`pack_beams_ref`: copies of the beams that a selection chooses from, and where their hidden rows lie.

    Args, Returns, Writes, Padding, Raises: as in `pack_beams_ref`.
    """
    kernels = _on(beams)
    pack = reference.pack_beams_ref if kernels is None else kernels.pack_beams
    return pack(
        beams,
        cu_rows=cu_rows,
        first_rows=first_rows,
        hidden_starts=hidden_starts,
        num_rows=num_rows,
        level=level,
        num_levels=num_levels,
    )


def advance_beams(
    beams: Tensor,
    rows: Tensor,
    parent_rows: Tensor,
    codes: Tensor,
    cum_logprobs: Tensor,
    child_nodes: Tensor,
    *,
    trie_nodes: Tensor,
    finite: Tensor,
    cu_rows: Tensor,
    cu_out: Tensor,
    first_rows: Tensor,
    first_slots: Tensor,
    level: int,
    num_levels: int,
) -> None:
    """`advance_beams_ref`: write the survivors of a selection where their requests' beams lie.

    Args, Writes, Padding, Aliasing, Raises: as in `advance_beams_ref`.
    """
    kernels = _on(beams)
    advance = reference.advance_beams_ref if kernels is None else kernels.advance_beams
    advance(
        beams,
        rows,
        parent_rows,
        codes,
        cum_logprobs,
        child_nodes,
        trie_nodes=trie_nodes,
        finite=finite,
        cu_rows=cu_rows,
        cu_out=cu_out,
        first_rows=first_rows,
        first_slots=first_slots,
        level=level,
        num_levels=num_levels,
    )
