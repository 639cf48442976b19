# mypy: disable-error-code="no-untyped-def"
"""Beams packed into a step and moved on by a selection: three small launches that a graph can hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.ops._checks import check_index
from onela.ops.beams import columns
from onela.ops.beams.reference import check_beams, check_step, check_survivors

NODE, SCORE, PARENT = tl.constexpr(columns.NODE), tl.constexpr(columns.SCORE), tl.constexpr(columns.PARENT)
INVALID, HEAD = tl.constexpr(columns.INVALID), tl.constexpr(columns.HEAD)
NEVER = tl.constexpr(2147483647)
BLOCK = 32


@triton.jit
def owner_of(o_n, p_cu, B, STEPS: tl.constexpr):
    """The request of each row: how many of `cu[1:]` are no more than its number. B past the last."""
    low = tl.zeros_like(o_n)
    high = low + B
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        end = tl.load(p_cu + 1 + middle, mask=middle < B, other=NEVER)
        right = (low < high) & (end <= o_n)
        high = tl.where(right, high, tl.where(low < high, middle, high))
        low = tl.where(right, middle + 1, low)
    return low


@triton.jit
def _node(p_row, live):
    """The int64 number in the first two columns."""
    low = tl.load(p_row + NODE, mask=live, other=-1).to(tl.int64)
    high = tl.load(p_row + NODE + 1, mask=live, other=-1).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def pack_step_kernel(
    p_beams, p_tokens, p_cu_rows, p_first_rows, p_first_slots, p_prompts, p_depths, p_lengths, p_token_starts,
    p_fields, p_ancestors, N, B, stride, SIZE: tl.constexpr, LEVELS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = owner_of(o_n, p_cu_rows, B, STEPS)
    inside = (o_n < N) & (r < B)
    within = o_n - tl.load(p_cu_rows + r, mask=inside, other=0)
    first = tl.load(p_first_rows + r, mask=inside, other=0)
    place = first + within
    depth = tl.load(p_depths + r, mask=inside, other=0)
    p_row = p_beams + place.to(tl.int64) * SIZE
    alive = inside & (_node(p_row, inside) >= 0)
    code = tl.maximum(tl.load(p_row + HEAD + depth, mask=inside, other=0), 0)
    token = tl.load(p_tokens + tl.load(p_token_starts + r, mask=inside, other=0) + code, mask=inside, other=0)
    parent = tl.load(p_row + PARENT, mask=inside, other=-1)
    slot = tl.load(p_first_slots + r, mask=inside, other=0) + within
    stored = o_n < N
    tl.store(p_fields + o_n, token, mask=stored)
    position = tl.load(p_lengths + r, mask=inside, other=0) + depth
    tl.store(p_fields + stride + o_n, position, mask=stored)
    tl.store(p_fields + 2 * stride + o_n, tl.where(alive, slot, -1), mask=stored)
    tl.store(p_fields + 3 * stride + o_n, tl.where(alive, place, -1), mask=stored)
    known = alive & (parent >= 0) & (depth > 0)
    tl.store(p_fields + 4 * stride + o_n, tl.where(known, first + parent, -1), mask=stored)
    prompt = tl.load(p_prompts + r, mask=inside, other=-1)
    tl.store(p_fields + 5 * stride + o_n, tl.where(alive, prompt, -1), mask=stored)
    tl.store(p_fields + 6 * stride + o_n, depth, mask=stored)
    if DEPTH > 0:
        o_d = tl.arange(0, BLOCK_D)
        held = inside[:, None] & (o_d < depth[:, None])
        b_h = tl.load(p_row[:, None] + HEAD + 2 * LEVELS + o_d, mask=held, other=-1)
        tl.store(
            p_ancestors + o_n[:, None].to(tl.int64) * DEPTH + o_d, b_h, mask=stored[:, None] & (o_d < DEPTH)
        )


@triton.jit
def pack_beams_kernel(
    p_beams, p_cu_rows, p_first_rows, p_hidden_starts, p_cum, p_nodes, p_hidden_rows, p_rows, N, B,
    SIZE: tl.constexpr, LEVEL: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_f = tl.arange(0, BLOCK_F)
    r = owner_of(o_n, p_cu_rows, B, STEPS)
    stored = o_n < N
    inside = stored & (r < B)
    within = o_n - tl.load(p_cu_rows + r, mask=inside, other=0)
    place = (tl.load(p_first_rows + r, mask=inside, other=0) + within).to(tl.int64)
    hidden = tl.load(p_hidden_starts + r, mask=inside, other=0) + within
    tl.store(p_hidden_rows + o_n, tl.where(inside, hidden, 0).to(tl.int64), mask=stored)
    p_row = p_beams + place * SIZE
    tile = tl.full([BLOCK_N, BLOCK_F], -1, tl.int32)
    if LEVEL == 0:
        cum = tl.where(inside, 0.0, -float("inf"))
        node = tl.where(inside, 0, -1).to(tl.int64)
        tl.store(p_row + INVALID, 0, mask=inside)
    else:
        node = _node(p_row, inside)
        cum = tl.load(p_row + SCORE, mask=inside, other=0).to(tl.float32, bitcast=True)
        cum = tl.where(inside, cum, -float("inf"))
        tile = tl.load(p_row[:, None] + o_f, mask=inside[:, None] & (o_f < SIZE), other=-1)
    tl.store(p_cum + o_n, cum, mask=stored)
    tl.store(p_nodes + o_n, node, mask=stored)
    tl.store(p_rows + o_n[:, None].to(tl.int64) * SIZE + o_f, tile, mask=stored[:, None] & (o_f < SIZE))


@triton.jit
def advance_beams_kernel(
    p_beams, p_rows, p_parents, p_codes, p_cum, p_children, p_nodes, p_finite, p_cu_rows, p_cu_out, p_first_rows,
    p_first_slots, N, M, B, SIZE: tl.constexpr, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_f = tl.arange(0, BLOCK_F)
    # A living beam before that could not be ranked marks its request.
    r = owner_of(o_n, p_cu_rows, B, STEPS)
    inside = (o_n < N) & (r < B)
    usable = tl.load(p_finite + o_n, mask=inside, other=1).to(tl.int32)
    bad = inside & (usable == 0) & (tl.load(p_nodes + o_n, mask=inside, other=-1) >= 0)
    home = tl.load(p_first_rows + r, mask=bad, other=0).to(tl.int64)
    tl.store(p_beams + home * SIZE + INVALID, 1, mask=bad)
    # The survivors, each in its place.
    r = owner_of(o_n, p_cu_out, B, STEPS)
    inside = (o_n < M) & (r < B)
    parent = tl.load(p_parents + o_n, mask=inside, other=-1)
    alive = parent >= 0
    local = tl.where(alive, parent - tl.load(p_cu_rows + r, mask=inside, other=0), -1)
    home = tl.load(p_first_rows + r, mask=inside, other=0)
    place = (home + o_n - tl.load(p_cu_out + r, mask=inside, other=0)).to(tl.int64)
    code = tl.load(p_codes + o_n, mask=inside, other=-1)
    total = tl.load(p_cum + o_n, mask=inside, other=-float("inf")).to(tl.int32, bitcast=True)
    child = tl.load(p_children + o_n, mask=inside, other=-1)
    p_row = p_rows + tl.maximum(parent, 0).to(tl.int64) * SIZE
    tile = tl.load(p_row[:, None] + o_f, mask=alive[:, None] & (o_f < SIZE), other=-1)
    o_f = o_f[None, :]
    tile = tl.where(o_f == NODE, (child & 0xFFFFFFFF).to(tl.int32)[:, None], tile)
    tile = tl.where(o_f == NODE + 1, (child >> 32).to(tl.int32)[:, None], tile)
    tile = tl.where(o_f == SCORE, total[:, None], tile)
    tile = tl.where(o_f == PARENT, local[:, None], tile)
    tile = tl.where(o_f == HEAD + LEVEL, code[:, None], tile)
    tile = tl.where(o_f == HEAD + LEVELS + LEVEL, total[:, None], tile)
    if LEVEL > 0:
        slot = tl.load(p_first_slots + r, mask=inside, other=-1)
        written = tl.where(alive & (slot >= 0), slot + local, -1)
        tile = tl.where(o_f == HEAD + 2 * LEVELS + LEVEL - 1, written[:, None], tile)
    kept = inside[:, None] & (o_f < SIZE) & (o_f != INVALID)
    tl.store(p_beams + place[:, None] * SIZE + o_f, tile, mask=kept)


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
    """`pack_step_ref` in one launch. Layout: every tensor contiguous."""
    N, B = num_rows, cu_rows.shape[0] - 1
    check_step(
        beams, num_levels, cu_rows, first_rows, token_table,
        first_slots=first_slots, prompts=prompts, depths=depths, lengths=lengths, token_starts=token_starts,
    )  # fmt: skip
    # Every field begins at a multiple of 16 bytes: kernels are compiled for that once.
    stride = -(-N // 4) * 4
    fields = torch.empty(7, stride, dtype=torch.int32, device=beams.device)
    ancestors = torch.empty(N, depth, dtype=torch.int32, device=beams.device)
    if N:
        pack_step_kernel[(triton.cdiv(N, BLOCK),)](
            beams, token_table, cu_rows, first_rows, first_slots, prompts, depths, lengths, token_starts, fields,
            ancestors, N, B, stride, SIZE=beams.shape[1], LEVELS=num_levels, DEPTH=depth,
            BLOCK_D=triton.next_power_of_2(max(depth, 1)), BLOCK_N=BLOCK, STEPS=B.bit_length(), num_warps=1,
        )  # fmt: skip
    return fields[:, :N], ancestors


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
    """`pack_beams_ref` in one launch. Layout: every tensor contiguous."""
    N, B, device = num_rows, cu_rows.shape[0] - 1, beams.device
    check_beams(beams, num_levels, cu_rows, first_rows)
    check_index("hidden_starts", hidden_starts, B)
    cum = torch.empty(N, dtype=torch.float32, device=device)
    nodes, hidden_rows = (torch.empty(N, dtype=torch.int64, device=device) for _ in range(2))
    rows = torch.empty(N, beams.shape[1], dtype=torch.int32, device=device)
    if N:
        pack_beams_kernel[(triton.cdiv(N, BLOCK),)](
            beams, cu_rows, first_rows, hidden_starts, cum, nodes, hidden_rows, rows, N, B, SIZE=beams.shape[1],
            LEVEL=level, BLOCK_F=triton.next_power_of_2(beams.shape[1]), BLOCK_N=BLOCK, STEPS=B.bit_length(),
            num_warps=1,
        )  # fmt: skip
    return cum, nodes, hidden_rows, rows


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
    """`advance_beams_ref` in one launch. Layout: every tensor contiguous."""
    N, M, B = rows.shape[0], parent_rows.shape[0], cu_rows.shape[0] - 1
    check_survivors(
        beams, rows, parent_rows, codes, cum_logprobs, child_nodes, trie_nodes, finite, cu_rows, cu_out, first_rows,
        first_slots, num_levels,
    )  # fmt: skip
    if max(N, M):
        advance_beams_kernel[(triton.cdiv(max(N, M), BLOCK),)](
            beams, rows, parent_rows, codes, cum_logprobs, child_nodes, trie_nodes, finite, cu_rows, cu_out,
            first_rows, first_slots, N, M, B, SIZE=beams.shape[1], LEVEL=level, LEVELS=num_levels,
            BLOCK_F=triton.next_power_of_2(beams.shape[1]), BLOCK_N=BLOCK, STEPS=B.bit_length(), num_warps=1,
        )  # fmt: skip
