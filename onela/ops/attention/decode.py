"""Attention of one decode step in Triton: beams are rows of one matrix product with their prompt's keys.

A tile holds BLOCK_M rows (beam, head of the group) of one request and key head. It meets the prompt's pages
block by block, and then its beams' own keys: for each depth the ancestors of the tile's beams form one more
block of keys, in which every row sees one column. When there are too few tiles to fill the device, the prompt
is cut into splits, and a second launch merges them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._checks import check_float, check_groups, check_index
from onela.ops._device import multiprocessors, shared_memory
from onela.ops._overlap import overlap_of, wait_for_previous

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Finite, so that a row that has seen no key yet needs no special case: exp2(-1e30 - anything seen) is 0.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def tile_of(i_t, p_cu_rows, B, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr):
    """Which request tile `i_t` belongs to, and its number there; B past the last."""
    o_b = tl.arange(0, BLOCK_B)
    low = tl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    high = tl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    tiles = ((high - low) * G + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    r = tl.sum((ends <= i_t).to(tl.int32), 0)
    return tl.minimum(r, B), i_t - tl.sum(tl.where(o_b == r, ends - tiles, 0), 0)


@triton.jit
def _attend(b_q, b_k, b_v, seen, acc, peak, total, scale_log2, MASKED: tl.constexpr, FP32_DOT: tl.constexpr):
    """One block of keys of the online softmax; `seen` says which row sees which key."""
    if FP32_DOT:
        b_k = b_k.to(tl.float32)
        b_v = b_v.to(tl.float32)
    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp2(s - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision="ieee")
    return acc, new_peak, total * alpha + tl.sum(p, 1)


@triton.jit
def beam_attention_decode_kernel(
    p_q, p_k, p_v, p_k_cache, p_v_cache, p_page_table, p_prompt_lens, p_records_k, p_records_v, p_slots,
    p_ancestors, p_cu_rows, p_prompts, p_depths, p_o, p_part_lse, stride_q, stride_k, stride_v, stride_table,
    stride_ancestors, scale_log2, N, B, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OWN: tl.constexpr, SPLITS: tl.constexpr, BLOCK_B: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """One tile of rows, key head and split; the last split takes the own keys and writes the records."""
    i_t, i_h, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, i_t = tile_of(i_t, p_cu_rows, B, G, BLOCK_M, BLOCK_B)
    o_d = tl.arange(0, BLOCK_D)
    in_d = o_d < D
    HQ: tl.constexpr = HKV * G
    if SPLITS == 1:  # noqa: SIM102 (known when compiled)
        if tl.program_id(0) == 0:
            # Rows past the last request give zeros.
            for m in range(tl.load(p_cu_rows + B) * G, N * G, BLOCK_M):
                o_m = m + tl.arange(0, BLOCK_M)
                at = (o_m // G).to(tl.int64) * HQ + i_h * G + o_m % G
                zeros = tl.zeros([BLOCK_M, BLOCK_D], p_o.dtype.element_ty)
                mask = (o_m < N * G)[:, None] & in_d[None, :]
                tl.store(p_o + at[:, None] * D + o_d[None, :], zeros, mask=mask)
    if r < B:
        row0 = tl.load(p_cu_rows + r)
        width = tl.load(p_cu_rows + r + 1) - row0
        prompt = tl.load(p_prompts + r).to(tl.int64)
        served = prompt >= 0
        depth = tl.load(p_depths + r)
        length = tl.load(p_prompt_lens + prompt, mask=served, other=0)
        o_m = i_t * BLOCK_M + tl.arange(0, BLOCK_M)
        beam = o_m // G
        row = (row0 + beam).to(tl.int64)
        head = i_h * G + o_m % G
        in_m = (beam < width) & served
        live = in_m & (tl.load(p_slots + row, mask=in_m, other=-1) >= 0)
        b_q = tl.load(
            p_q + row[:, None] * stride_q + head[:, None] * D + o_d[None, :],
            mask=live[:, None] & in_d[None, :],
            other=0.0,
        )
        if FP32_DOT:
            b_q = b_q.to(tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        blocks = (length + BLOCK_N - 1) // BLOCK_N
        first = (blocks * i_s) // SPLITS
        last = (blocks * (i_s + 1)) // SPLITS
        o_n = tl.arange(0, BLOCK_N)
        p_table = p_page_table + prompt * stride_table
        for block in range(first, tl.minimum(last, length // BLOCK_N)):
            page = tl.load(p_table + block * BLOCK_N // PAGE).to(tl.int64)
            token = page * PAGE + (block * BLOCK_N) % PAGE + o_n
            at = (token[:, None] * HKV + i_h) * D + o_d[None, :]
            if BLOCK_D == D:
                b_k = tl.load(p_k_cache + at)
                b_v = tl.load(p_v_cache + at)
            else:
                b_k = tl.load(p_k_cache + at, mask=in_d[None, :], other=0.0)
                b_v = tl.load(p_v_cache + at, mask=in_d[None, :], other=0.0)
            acc, peak, total = _attend(b_q, b_k, b_v, None, acc, peak, total, scale_log2, False, FP32_DOT)
        if (last == blocks) & (first < last) & (length % BLOCK_N > 0):
            start = (blocks - 1) * BLOCK_N
            page = tl.load(p_table + start // PAGE).to(tl.int64)
            token = page * PAGE + start % PAGE + o_n
            inside = start + o_n < length
            at = (token[:, None] * HKV + i_h) * D + o_d[None, :]
            # What lies behind the prompt's end may be anything, NaN too.
            b_k = tl.load(p_k_cache + at, mask=inside[:, None] & in_d[None, :], other=0.0)
            b_v = tl.load(p_v_cache + at, mask=inside[:, None] & in_d[None, :], other=0.0)
            acc, peak, total = _attend(
                b_q, b_k, b_v, inside[None, :], acc, peak, total, scale_log2, True, FP32_DOT
            )
        if i_s == SPLITS - 1:
            beam0 = (i_t * BLOCK_M) // G
            own_beam = beam0 + tl.arange(0, OWN)
            own_row = (row0 + own_beam).to(tl.int64)
            own_in = (own_beam < width) & (own_beam * G < (i_t + 1) * BLOCK_M) & served
            slot = tl.load(p_slots + own_row, mask=own_in, other=-1).to(tl.int64)
            own_live = own_in & (slot >= 0)
            mine = (beam[:, None] == own_beam[None, :]) & live[:, None]
            for j in range(depth):
                ancestor = tl.load(p_ancestors + own_row * stride_ancestors + j, mask=own_live, other=-1).to(
                    tl.int64
                )
                has = ancestor >= 0
                at = (ancestor[:, None] * HKV + i_h) * D + o_d[None, :]
                b_k = tl.load(p_records_k + at, mask=has[:, None] & in_d[None, :], other=0.0).to(b_q.dtype)
                b_v = tl.load(p_records_v + at, mask=has[:, None] & in_d[None, :], other=0.0).to(b_q.dtype)
                acc, peak, total = _attend(
                    b_q, b_k, b_v, mine & has[None, :], acc, peak, total, scale_log2, True, FP32_DOT
                )
            at = i_h * D + o_d[None, :]
            own_mask = own_live[:, None] & in_d[None, :]
            b_k = tl.load(p_k + own_row[:, None] * stride_k + at, mask=own_mask, other=0.0)
            b_v = tl.load(p_v + own_row[:, None] * stride_v + at, mask=own_mask, other=0.0)
            # A beam whose rows begin in the tile before is written there.
            write = (own_live & (own_beam * G >= i_t * BLOCK_M))[:, None] & in_d[None, :]
            b_k = b_k.to(p_records_k.dtype.element_ty)
            b_v = b_v.to(p_records_v.dtype.element_ty)
            at = (slot[:, None] * HKV + i_h) * D + o_d[None, :]
            tl.store(p_records_k + at, b_k, mask=write)
            tl.store(p_records_v + at, b_v, mask=write)
            acc, peak, total = _attend(
                b_q, b_k.to(b_q.dtype), b_v.to(b_q.dtype), mine & own_live[None, :], acc, peak, total, scale_log2,
                True, FP32_DOT,
            )  # fmt: skip
        # A padding row has met the prompt as if its query were zero.
        total = tl.where(live, total, 0.0)
        acc = tl.where((total > 0.0)[:, None], acc / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
        out = row * HQ + head
        if SPLITS > 1:
            out += i_s.to(tl.int64) * N * HQ
            lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
            tl.store(p_part_lse + out, lse, mask=beam < width)
        tl.store(
            p_o + out[:, None] * D + o_d[None, :],
            acc.to(p_o.dtype.element_ty),
            mask=(beam < width)[:, None] & in_d[None, :],
        )


@triton.jit
def beam_attention_merge_kernel(
    p_part_o, p_part_lse, p_o, p_cu_rows, N, B,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: the splits' outputs, weighted by how much of the softmax each holds."""
    wait_for_previous(OVERLAP)
    i_n = tl.program_id(0).to(tl.int64)
    o_h, o_d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (o_h < HQ)[:, None] & (o_d < D)[None, :]
    at = i_n * HQ + o_h
    inside = (o_h < HQ) & (i_n < tl.load(p_cu_rows + B))
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    for s in tl.static_range(SPLITS):
        lse = tl.load(p_part_lse + s * N * HQ + at, mask=inside, other=-float("inf"))
        peak = tl.maximum(peak, lse)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for s in tl.static_range(SPLITS):
        lse = tl.load(p_part_lse + s * N * HQ + at, mask=inside, other=-float("inf"))
        weight = tl.exp2(lse - peak)
        total += weight
        p_part = p_part_o + (s * N * HQ + at)[:, None] * D + o_d[None, :]
        acc += weight[:, None] * tl.load(p_part, mask=mask & inside[:, None], other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(p_o + at[:, None] * D + o_d[None, :], acc.to(p_o.dtype.element_ty), mask=mask)


def choose_splits(tiles: int, blocks: int, device: torch.device) -> int:
    """Pieces of the prompt: enough to fill the device, none of less than four blocks."""
    return max(1, min(multiprocessors(device) // max(1, tiles), blocks // 4, 32))


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    records_k: Tensor,
    records_v: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
) -> None:
    """Refuse what the kernels cannot take; raises ShapeError or DtypeError."""
    N, HQ, D = q.shape
    HKV = k.shape[1]
    check_groups(HQ, HKV)
    check_float("k", k, N, HKV, D)
    check_float("v", v, N, HKV, D)
    check_float("k_cache", k_cache, None, None, HKV, D)
    check_float("v_cache", v_cache, *k_cache.shape)
    check_float("records_k", records_k, None, HKV, D)
    check_float("records_v", records_v, *records_k.shape)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("page_table", page_table, None, None)
    check_index("prompts", prompts, cu_rows.shape[0] - 1)
    check_index("depths", depths, cu_rows.shape[0] - 1)
    page_size = k_cache.shape[1]
    if page_size < 16 or page_size & (page_size - 1):
        raise ShapeError(f"k_cache: the page size must be a power of two, at least 16, got {page_size}")
    if D > 256:
        raise ShapeError(f"q: heads of at most 256, got {D}")
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise DtypeError(
            f"k_cache, v_cache: expected q's dtype {q.dtype}, got {k_cache.dtype}, {v_cache.dtype}"
        )
    for name, tensor in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("records_k", records_k),
        ("records_v", records_v),
    ):
        if not tensor.is_contiguous():
            raise DtypeError(f"{name}: must be contiguous")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if N and tensor.stride()[1:] != (D, 1):
            raise DtypeError(f"{name}: heads of a row must be contiguous, got strides {tensor.stride()}")


def beam_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prompt_lens: Tensor,
    records_k: Tensor,
    records_v: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None = None,
    block_m: int | None = None,
    splits: int | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """One decode step: every beam attends to its prompt, to its ancestors' keys and to its own.

    Args:
        q: [N, HQ, D]; k, v: [N, HKV, D]; HQ a multiple of HKV, D at most 256, positions already applied.
        k_cache, v_cache: [num_pages, page_size, HKV, D] in q's dtype; page_size a power of two, at least 16.
        page_table: [num_prompts, max_pages] int32, pages of each prompt in order.
        prompt_lens: [num_prompts] int32, tokens of each prompt.
        records_k, records_v: [num_slots, HKV, D].
        slots, ancestors, cu_rows, prompts, depths: as in `onela.ops.gated_delta.replay_step_ref`.
        scale: None means `D**-0.5`.
        block_m, splits, num_warps: rows of a tile, pieces of the prompt, warps of a program; None chooses.
    Returns:
        o: [N, HQ, D] in q's dtype.

    Writes: records_k and records_v at `slots`.
    Layout: caches and records contiguous; rows of q, k, v may be strided.
    Padding: rows whose slot is PAD, and rows past `cu_rows[-1]`, read and write nothing and give zeros.
    Aliasing: ancestors may repeat between rows; no slot that is written is read as an ancestor in the same
        launch.
    Numerics: fp32 scores and softmax, weights rounded to q's dtype; splits merged by log-sum-exp in a fixed
        order; deterministic. How a prompt is split depends on the batch's shape.
    Raises: ShapeError, DtypeError.
    """
    check_attention(
        q, k, v, k_cache, v_cache, page_table, records_k, records_v, slots, ancestors, cu_rows, prompts, depths
    )  # fmt: skip
    N, HQ, D = q.shape
    HKV, page_size = k.shape[1], k_cache.shape[1]
    G, B = HQ // HKV, cu_rows.shape[0] - 1
    o = torch.empty(N, HQ, D, dtype=q.dtype, device=q.device)
    if N == 0 or B == 0:
        return o.zero_()
    if block_m is None:
        block_m = 128 if N * G >= 128 * B else 64 if N * G > 16 * B else 16
    block_d = triton.next_power_of_2(D)
    block_n = min(64, page_size)
    # A tile of queries and two blocks of keys and values each in flight must fit into shared memory.
    while block_n > 16 and (block_m + 4 * block_n) * block_d * q.element_size() > shared_memory(q.device):
        block_n //= 2
    own = max(16, triton.next_power_of_2(block_m // G if block_m % G == 0 else (block_m - 1) // G + 2))
    tiles = N * G // block_m + B
    if splits is None:
        blocks = page_table.shape[1] * page_size // block_n
        splits = choose_splits(triton.cdiv(N * G, block_m) * HKV, blocks, q.device)
    part_lse = torch.empty(splits, N, HQ, dtype=torch.float32, device=q.device) if splits > 1 else None
    part_o = torch.empty(splits, N, HQ, D, dtype=torch.float32, device=q.device) if splits > 1 else None
    scale = D**-0.5 if scale is None else scale
    beam_attention_decode_kernel[(tiles, HKV, splits)](
        q, k, v, k_cache, v_cache, page_table, prompt_lens, records_k, records_v, slots, ancestors, cu_rows,
        prompts, depths, o if part_o is None else part_o, part_lse, q.stride(0), k.stride(0), v.stride(0),
        page_table.stride(0), ancestors.stride(0), scale * math.log2(math.e), N, B, HKV=HKV, G=G, D=D,
        BLOCK_D=block_d, PAGE=page_size, BLOCK_M=block_m, BLOCK_N=block_n, OWN=own,
        SPLITS=splits, BLOCK_B=triton.next_power_of_2(B), FP32_DOT=INTERPRETED,
        num_warps=num_warps or (8 if block_m == 128 else 4), num_stages=2,
    )  # fmt: skip
    if part_o is not None:
        merge_splits(part_o, part_lse, o, cu_rows)
    return o


def merge_splits(part_o: Tensor, part_lse: Tensor | None, o: Tensor, cu_rows: Tensor) -> None:
    """Merge [splits, N, HQ, D] fp32 partial outputs, with their log-sum-exps in base 2, into `o`."""
    splits, N, HQ, D = part_o.shape
    block_d = triton.next_power_of_2(D)
    block_h = min(triton.next_power_of_2(HQ), max(1, 2048 // block_d))
    beam_attention_merge_kernel[(N, triton.cdiv(HQ, block_h))](
        part_o, part_lse, o, cu_rows, N, cu_rows.shape[0] - 1,
        HQ=HQ, D=D, BLOCK_H=block_h, BLOCK_D=block_d, SPLITS=splits, num_warps=4, **overlap_of(o.device),
    )  # fmt: skip
