"""Beams packed into a step and moved on by a selection, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops._checks import check_float, check_index, check_shape
from onela.ops.beams.columns import HEAD, INVALID, NODE, PARENT, SCORE, ancestors_at, row_size, scores_at
from onela.ops.indexing import rows_to_requests


def pack_step_ref(
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
    """What a decode forward has to know of each of its rows, for several requests at any depths.

    Args:
        beams: [P, F] int32, the rows of all live beams (`columns`).
        token_table: [C] int32, the tokens of all levels, in code order.
        cu_rows: [B+1] int32; the beams of request `r` are the forward's rows `cu_rows[r] : cu_rows[r+1]`.
        first_rows: [B] int32, where they lie in `beams`. first_slots: [B] int32, where their records go.
        prompts, depths, lengths: [B] int32, the request's place in the prompt pool, its number of ancestors, and the
            tokens of its prompt. token_starts: [B] int32, where the tokens of its last level begin in `token_table`.
        num_rows: N, at least `cu_rows[-1]`. depth: D, at least the largest of `depths`. num_levels: of a row.
    Returns:
        fields: [7, N] int32: token ids, positions, slots, rows of `beams`, the parents' rows of `beams`, prompts,
            depths.
        ancestors: [N, D] int32, oldest first, PAD past the request's depth.

    Padding: rows past `cu_rows[-1]` are PAD in slots, rows, parents and prompts, and so are beams that do not live;
        parents at depth 0 are PAD, for there the parent is the prompt.
    Raises: ShapeError, DtypeError.
    """
    check_step(
        beams, num_levels, cu_rows, first_rows, token_table,
        first_slots=first_slots, prompts=prompts, depths=depths, lengths=lengths, token_starts=token_starts,
    )  # fmt: skip
    request, within, inside = _owners(cu_rows, num_rows)
    first = first_rows.to(torch.int64)[request]
    places = torch.where(inside, first + within, 0)
    packed = beams.index_select(0, places)
    at_depth = torch.where(inside, depths.to(torch.int64)[request], 0)
    alive = inside & (packed[:, NODE : NODE + 2].contiguous().view(torch.int64)[:, 0] >= 0)
    code = torch.where(alive, packed.gather(1, HEAD + at_depth[:, None])[:, 0], 0)
    starts = torch.where(inside, token_starts.to(torch.int64)[request], 0)
    parents = packed[:, PARENT].to(torch.int64)
    fields = torch.stack(
        [
            torch.where(inside, token_table[starts + code], 0),
            torch.where(inside, lengths[request] + at_depth, 0),
            torch.where(alive, first_slots[request] + within, -1),
            torch.where(alive, places, -1),
            torch.where(alive & (parents >= 0) & (at_depth > 0), first + parents, -1),
            torch.where(alive, prompts[request], -1),
            at_depth,
        ]
    ).to(torch.int32)
    at = ancestors_at(num_levels)
    ancestors = packed[:, at : at + depth]
    if ancestors.shape[1] < depth:
        ancestors = torch.nn.functional.pad(ancestors, (0, depth - ancestors.shape[1]), value=-1)
    known = torch.arange(depth, device=beams.device)[None] < at_depth[:, None]
    return fields, torch.where(known, ancestors, -1).to(torch.int32)


def pack_beams_ref(
    beams: Tensor,
    *,
    cu_rows: Tensor,
    first_rows: Tensor,
    hidden_starts: Tensor,
    num_rows: int,
    level: int,
    num_levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies of the beams that a selection chooses from, and where their hidden rows lie.

    Args:
        beams: [P, F] int32, the rows of all live beams (`columns`).
        cu_rows: [B+1] int32, rows of each request. first_rows: [B] int32, where they lie in `beams`.
        hidden_starts: [B] int32, the hidden row of each request's first beam; the others' follow.
        num_rows: N, at least `cu_rows[-1]`. level: which is chosen; at level 0 every request has one beam, the prompt.
        num_levels: of a row.
    Returns:
        cum_logprobs: [N] fp32. trie_nodes: [N] int64. hidden_rows: [N] int64. rows: [N, F] int32, the beams.

    Writes: beams, at level 0: the requests' marks of logits that could not be ranked are taken away.
    Padding: rows past `cu_rows[-1]` have node PAD, a sum of -inf and hidden row 0.
    Raises: ShapeError, DtypeError.
    """
    check_beams(beams, num_levels, cu_rows, first_rows)
    check_index("hidden_starts", hidden_starts, cu_rows.shape[0] - 1)
    request, within, inside = _owners(cu_rows, num_rows)
    hidden_rows = torch.where(inside, hidden_starts.to(torch.int64)[request] + within, 0)
    if level == 0:
        beams[first_rows.to(torch.int64)[request[inside]], INVALID] = 0
        zeros = torch.zeros(num_rows, device=beams.device)
        rows = beams.new_full((num_rows, beams.shape[1]), -1)
        return (
            zeros.masked_fill(~inside, float("-inf")),
            torch.where(inside, 0, -1).to(torch.int64),
            hidden_rows,
            rows,
        )
    places = torch.where(inside, first_rows.to(torch.int64)[request] + within, 0)
    rows = beams.index_select(0, places)
    nodes = rows[:, : NODE + 2].contiguous().view(torch.int64)[:, 0]
    totals = rows[:, SCORE].contiguous().view(torch.float32)
    return (
        totals.masked_fill(~inside, float("-inf")),
        nodes.masked_fill(~inside, -1),
        hidden_rows,
        rows,
    )


def advance_beams_ref(
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
    """Write the survivors of a selection where their requests' beams lie.

    `h_t(b, j) = h_{t-1}(parent_t(b), j)` for `j < t - 1`, and `h_t(b, t - 1)` is the slot that the parent wrote.

    Args:
        beams: [P, F] int32, the rows of all live beams (`columns`).
        rows: [N, F] int32, the beams before, as `pack_beams` gives them; trie_nodes: [N] int64, likewise.
        parent_rows, codes: [M] int32, cum_logprobs: [M] fp32, child_nodes: [M] int64: what `beam_select` gives.
        finite: [N] bool, whether the logits of a row could be ranked.
        cu_rows, cu_out: [B+1] int32, rows and survivors of each request. first_rows: [B] int32, where its beams lie.
        first_slots: [B] int32, the slot that the first beam before has written; PAD: nobody asks for ancestors.
        level: which was chosen. num_levels: of a row.

    Writes: beams, the survivors of each request, and its mark if the logits of a living beam could not be ranked.
    Padding: places for which there was no continuation hold a beam that does not live.
    Aliasing: `rows` is a copy, so survivors may lie where their parents lay.
    Raises: ShapeError, DtypeError.
    """
    N, M = rows.shape[0], parent_rows.shape[0]
    check_survivors(
        beams, rows, parent_rows, codes, cum_logprobs, child_nodes, trie_nodes, finite, cu_rows, cu_out, first_rows,
        first_slots, num_levels,
    )  # fmt: skip
    homes = first_rows.to(torch.int64)
    if N:
        request, _, inside = _owners(cu_rows, N)
        bad = inside & ~finite & (trie_nodes >= 0)
        beams[homes[request[bad]], INVALID] = 1
    if not M:
        return
    request, within, inside = _owners(cu_out, M)
    parents = parent_rows.to(torch.int64)
    alive = (parents >= 0) & inside
    local = torch.where(alive, parents - cu_rows.to(torch.int64)[request], -1)
    moved = rows.index_select(0, parents.clamp(min=0)).masked_fill_(~alive[:, None], -1)
    totals = cum_logprobs.to(torch.float32).contiguous().view(torch.int32)
    moved[:, NODE : NODE + 2] = child_nodes.to(torch.int64).contiguous().view(torch.int32).view(M, 2)
    moved[:, SCORE] = totals
    moved[:, PARENT] = local.to(torch.int32)
    moved[:, HEAD + level] = codes.to(torch.int32)
    moved[:, scores_at(num_levels) + level] = totals
    if level:
        slots = first_slots.to(torch.int64)[request]
        written = torch.where(alive & (slots >= 0), slots + local, -1)
        moved[:, ancestors_at(num_levels) + level - 1] = written.to(torch.int32)
    places = (homes[request] + within)[inside]
    moved[:, INVALID] = beams[torch.where(inside, homes[request] + within, 0), INVALID]
    beams[places] = moved[inside]


def check_beams(beams: Tensor, num_levels: int, cu_rows: Tensor, first_rows: Tensor) -> None:
    """Raise `ShapeError` or `DtypeError` unless beams and where each request's lie fit each other."""
    check_index("beams", beams, None, row_size(num_levels))
    check_index("cu_rows", cu_rows, None)
    check_index("first_rows", first_rows, cu_rows.shape[0] - 1)


def check_step(
    beams: Tensor,
    num_levels: int,
    cu_rows: Tensor,
    first_rows: Tensor,
    token_table: Tensor,
    **per_request: Tensor,
) -> None:
    """The same of what `pack_step` takes."""
    check_beams(beams, num_levels, cu_rows, first_rows)
    for name, tensor in per_request.items():
        check_index(name, tensor, cu_rows.shape[0] - 1)
    check_index("token_table", token_table, None)


def check_survivors(
    beams: Tensor, rows: Tensor, parent_rows: Tensor, codes: Tensor, cum_logprobs: Tensor, child_nodes: Tensor,
    trie_nodes: Tensor, finite: Tensor, cu_rows: Tensor, cu_out: Tensor, first_rows: Tensor, first_slots: Tensor,
    num_levels: int,
) -> None:  # fmt: skip
    """The same of what `advance_beams` takes."""
    N, M, B = rows.shape[0], parent_rows.shape[0], cu_rows.shape[0] - 1
    check_beams(beams, num_levels, cu_rows, first_rows)
    check_index("rows", rows, None, beams.shape[1])
    check_index("parent_rows", parent_rows, M)
    check_index("codes", codes, M)
    check_float("cum_logprobs", cum_logprobs, M)
    check_index("child_nodes", child_nodes, M)
    check_index("trie_nodes", trie_nodes, N)
    check_shape("finite", finite, N)
    check_index("cu_out", cu_out, B + 1)
    check_index("first_slots", first_slots, B)


def _owners(cu_rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its request (the last one where it has none), its number there, and whether it has one."""
    B = cu_rows.shape[0] - 1
    request = rows_to_requests(cu_rows, num_rows)
    inside = request < B
    request = request.clamp(max=max(B - 1, 0))
    return request, torch.arange(num_rows, device=cu_rows.device) - cu_rows.to(torch.int64)[request], inside
