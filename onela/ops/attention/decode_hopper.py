"""The same step for Hopper (Triton Gluon): the prompt's pages by TMA, both products by asynchronous wgmma.

A program holds 128 rows (beam, head of the group) of one request and key head and walks over units of 64 keys. First come the full units
of the prompt, which the copy engine brings in from their pages. The rest are gathered row by row with cp.async: the prompt's last,
incomplete unit, then for each depth the ancestors of the tile's beams, then the beams' own new keys, as one flat list in which
every key says which beam may see it.

Scores of a unit are computed while the weighted values of the unit before are still being summed, and its softmax runs under that sum:

    issue S_i = Q K_i^T;   O *= alpha_(i-1);   issue O += P_(i-1) V_(i-1);   wait S_i;   P_i, alpha_i = softmax;   wait O
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops.attention.decode import check_attention, choose_splits, merge_splits

BLOCK_M = 128
BLOCK_N = 64
NUM_WARPS = 8
HEAD_SIZES = (64, 128, 256)


@gluon.jit
def _describe(e, job, tail, depth, row0, beam0, width, OWN: gl.constexpr):
    """Gathered keys `e` of a tile: prompt key or not, own new key or not, beam within the request, slot of the record, visible."""
    p_slots, p_ancestors, stride_ancestors = job
    own = e - tail
    j = own // OWN
    beam = beam0 + own % OWN
    inside = (own >= 0) & (j <= depth) & (beam < width)
    row = (row0 + beam).to(gl.int64)
    slot = gl.load(p_slots + row, mask=inside, other=-1)
    itself = j == depth
    ancestor = gl.load(p_ancestors + row * stride_ancestors + j, mask=(slot >= 0) & (j < depth), other=-1)
    of_prompt = own < 0
    visible = of_prompt | ((slot >= 0) & (itself | (ancestor >= 0)))
    return of_prompt, itself, beam, row, ancestor.to(gl.int64), visible


@gluon.jit
def _gather(
    unit, n_full, buffer, p_cache, p_new, stride_new, p_records, job, geometry,
    HKV: gl.constexpr, OWN: gl.constexpr, CP: gl.constexpr,
):  # fmt: skip
    """Start copying the rows of a gathered unit into `buffer`; rows that nobody sees come as zeros."""
    BLOCK_N: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    i_h, tail, tail_token, depth, row0, beam0, width, first_extra = geometry
    e = (first_extra + unit - n_full) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, CP))
    of_prompt, itself, _, row, ancestor, visible = _describe(e, job, tail, depth, row0, beam0, width, OWN)
    at_prompt = p_cache + ((tail_token + e) * HKV + i_h) * D
    at_new = p_new + row * stride_new + i_h * D
    at_record = p_records + (ancestor * HKV + i_h) * D
    source = gl.where(of_prompt, at_prompt, gl.where(itself, at_new, at_record))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    async_copy.async_copy_global_to_shared(
        buffer, source[:, None] + o_d[None, :], mask=visible[:, None] & (o_d < D)[None, :]
    )


@gluon.jit
def _issue(
    t, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page_before, page,
    HKV: gl.constexpr, PAGE: gl.constexpr, OWN: gl.constexpr, CP: gl.constexpr, WITH_V: gl.constexpr,
):  # fmt: skip
    """Start bringing in the keys of unit `t` and the values of unit `t - 1`: what turn `t` works on."""
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    PER_PAGE: gl.constexpr = PAGE // BLOCK_N
    k_desc, p_k_cache, p_k, stride_k, p_records_k = keys
    v_desc, p_v_cache, p_v, stride_v, p_records_v = values
    column = geometry[0] * D
    k_tile = k_tiles.index(t & 1)
    v_tile = v_tiles.index((t + 1) & 1)
    k_bar = k_bars.index(t & 1)
    v_bar = v_bars.index((t + 1) & 1)
    token = page * PAGE + ((first + t) & (PER_PAGE - 1)) * BLOCK_N
    token_before = page_before * PAGE + ((first + t - 1) & (PER_PAGE - 1)) * BLOCK_N
    # A copy whose condition is false does not take place, whatever its arguments.
    with_k = t < n_full
    mbarrier.expect(k_bar, BLOCK_N * D * 2, with_k)
    if WITH_V:
        with_v = t <= n_full
        mbarrier.expect(v_bar, BLOCK_N * D * 2, with_v)
        tma.async_copy_global_to_shared(v_desc, [token_before, column], v_bar, v_tile, with_v)
    tma.async_copy_global_to_shared(k_desc, [token, column], k_bar, k_tile, with_k)
    if (t >= n_full) & (t < n_units):
        _gather(t, n_full, k_tile, p_k_cache, p_k, stride_k, p_records_k, job, geometry, HKV, OWN, CP)
    if WITH_V:
        if (t > n_full) & (t <= n_units):
            _gather(t - 1, n_full, v_tile, p_v_cache, p_v, stride_v, p_records_v, job, geometry, HKV, OWN, CP)
    async_copy.commit_group()


@gluon.jit
def _softmax(s, peak, total, scale_log2):
    """One unit of the online softmax: weights, the new peak and sum, and the factor on what was summed before."""
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    return p, new_peak, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _see(s, unit, n_full, geometry, job, b_beam, OWN: gl.constexpr, BLOCK_N: gl.constexpr, MMA_S: gl.constexpr):
    """Scores of a gathered unit, -inf where a row does not see a key."""
    i_h, tail, tail_token, depth, row0, beam0, width, first_extra = geometry
    e = (first_extra + unit - n_full) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA_S))
    of_prompt, itself, beam, row, ancestor, visible = _describe(e, job, tail, depth, row0, beam0, width, OWN)
    seen = visible[None, :] & (of_prompt[None, :] | (beam[None, :] == b_beam[:, None]))
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _arrived():
    """Make what cp.async has brought in visible to the tensor cores of every warp."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def beam_attention_hopper_kernel(
    p_q, p_k, p_v, k_desc, v_desc, p_k_cache, p_v_cache, p_page_table, p_prompt_lens, p_records_k, p_records_v, p_slots,
    p_ancestors, p_cu_rows, p_prompts, p_depths, p_o, p_part_lse, stride_q, stride_k, stride_v, stride_table,
    stride_ancestors, scale_log2, N, B,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    OWN: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """One tile of rows, one key head, one split of the units; the last split writes the records."""
    NW: gl.constexpr = gl.num_warps()
    HQ: gl.constexpr = HKV * G
    PER_PAGE: gl.constexpr = PAGE // BLOCK_N
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BLOCK_N, 16])
    MMA_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA_O, k_width=2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, MMA_S)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, MMA_O)
    LANES: gl.constexpr = min(32, D // 8)
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    dtype: gl.constexpr = p_q.dtype.element_ty

    # Which request, and which of its tiles.
    o_b = gl.arange(0, BLOCK_B, layout=LIST)
    low = gl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    high = gl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    tiles = ((high - low) * G + BLOCK_M - 1) // BLOCK_M
    ends = gl.associative_scan(tiles, 0, _add)
    r = gl.sum((ends <= gl.program_id(0)).to(gl.int32), 0)
    i_t = gl.program_id(0) - gl.sum(gl.where(o_b == r, ends - tiles, 0), 0)
    i_h, i_s = gl.program_id(1), gl.program_id(2)
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, CP))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    if SPLITS == 1:
        if gl.program_id(0) == 0:
            # Rows past the last request give zeros.
            for m in range(gl.load(p_cu_rows + B) * G, N * G, BLOCK_M):
                at = ((m + o_m) // G).to(gl.int64) * HQ + i_h * G + (m + o_m) % G
                zeros = gl.zeros([BLOCK_M, D], dtype, CP)
                gl.store(p_o + at[:, None] * D + o_d[None, :], zeros, mask=(m + o_m < N * G)[:, None] & (o_d < D)[None, :])
    if r < B:
        row0 = gl.load(p_cu_rows + r)
        width = gl.load(p_cu_rows + r + 1) - row0
        prompt = gl.load(p_prompts + r).to(gl.int64)
        served = prompt >= 0
        width_served = gl.where(served, width, 0)
        depth = gl.load(p_depths + r)
        length = gl.load(p_prompt_lens + prompt, mask=served, other=0)
        p_table = p_page_table + prompt * stride_table
        beam0 = (i_t * BLOCK_M) // G

        # Units of this split: n_full of the prompt from unit `first` on, then gathered ones.
        whole = length // BLOCK_N
        tail = length - whole * BLOCK_N
        units = whole + (tail + (depth + 1) * OWN + BLOCK_N - 1) // BLOCK_N
        first = gl.minimum((units * i_s) // SPLITS, whole)
        n_full = gl.minimum((units * (i_s + 1)) // SPLITS, whole) - first
        first_extra = gl.maximum((units * i_s) // SPLITS, whole) - whole
        n_units = (units * (i_s + 1)) // SPLITS - (units * i_s) // SPLITS
        tail_page = gl.load(p_table + whole // PER_PAGE, mask=tail > 0, other=0)
        tail_token = tail_page.to(gl.int64) * PAGE + (whole & (PER_PAGE - 1)) * BLOCK_N
        geometry = (i_h, tail, tail_token, depth, row0, beam0, width_served, first_extra)
        job = (p_slots, p_ancestors, stride_ancestors)

        q_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, D], SHARED)
        k_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], SHARED)
        v_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], SHARED)
        k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(2):
            mbarrier.init(k_bars.index(stage), count=1)
            mbarrier.init(v_bars.index(stage), count=1)
        fence_async_shared()
        gl.thread_barrier()

        row = (row0 + (i_t * BLOCK_M + o_m) // G).to(gl.int64)
        in_m = (i_t * BLOCK_M + o_m) // G < width_served
        live = in_m & (gl.load(p_slots + row, mask=in_m, other=-1) >= 0)
        head = i_h * G + (i_t * BLOCK_M + o_m) % G
        async_copy.async_copy_global_to_shared(
            q_tile, (p_q + row * stride_q + head * D)[:, None] + o_d[None, :], mask=live[:, None] & (o_d < D)[None, :]
        )
        keys = (k_desc, p_k_cache, p_k, stride_k, p_records_k)
        values = (v_desc, p_v_cache, p_v, stride_v, p_records_v)
        page0 = gl.load(p_table + first // PER_PAGE, mask=n_full > 0, other=0)
        page1 = gl.load(p_table + (first + 1) // PER_PAGE, mask=n_full > 1, other=0)
        _issue(
            0, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page0, page0, HKV, PAGE, OWN, CP,
            False,
        )  # fmt: skip
        _issue(
            1, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page0, page1, HKV, PAGE, OWN, CP,
            True,
        )  # fmt: skip

        if i_s == SPLITS - 1:
            # The records, while the first units are on their way. A beam whose rows begin in the tile before is written there.
            for m in range(0, OWN, NW * (32 // LANES)):
                o_r = m + gl.arange(0, NW * (32 // LANES), layout=gl.SliceLayout(1, CP))
                beam = beam0 + o_r
                mine = (o_r < OWN) & (beam < width_served) & (beam * G >= i_t * BLOCK_M) & (beam * G < (i_t + 1) * BLOCK_M)
                slot = gl.load(p_slots + row0 + beam, mask=mine, other=-1).to(gl.int64)
                mask = (slot >= 0)[:, None] & (o_d < D)[None, :]
                source = (row0 + beam).to(gl.int64)
                target = ((slot * HKV + i_h) * D)[:, None] + o_d[None, :]
                b_k = gl.load(p_k + (source * stride_k + i_h * D)[:, None] + o_d[None, :], mask=mask)
                b_v = gl.load(p_v + (source * stride_v + i_h * D)[:, None] + o_d[None, :], mask=mask)
                gl.store(p_records_k + target, b_k, mask=mask)
                gl.store(p_records_v + target, b_v, mask=mask)

        b_beam = (i_t * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS_S)) // G
        acc = gl.zeros([BLOCK_M, D], gl.float32, MMA_O)
        peak = gl.full([BLOCK_M], -1.0e30, gl.float32, ROWS_S)
        total = gl.zeros([BLOCK_M], gl.float32, ROWS_S)
        no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA_S)
        if n_units > 0:
            async_copy.wait_group(1)
            _arrived()
            mbarrier.wait(k_bars.index(0), 0, n_full > 0)
            s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if n_full == 0:
                s = _see(s, 0, n_full, geometry, job, b_beam, OWN, BLOCK_N, MMA_S)
            p, peak, total, alpha = _softmax(s, peak, total, scale_log2)
            p = gl.convert_layout(p.to(dtype), OPERAND)
            gl.thread_barrier()
            page = gl.load(p_table + (first + 2) // PER_PAGE, mask=n_full > 2, other=0)
            _issue(
                2, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page1, page, HKV, PAGE, OWN,
                CP, True,
            )  # fmt: skip
            mbarrier.wait(k_bars.index(1), 0, n_full > 1)
            for i in range(1, n_full):
                # Looked up early: the copy at the end of the turn must not wait for it.
                next_page = gl.load(p_table + (first + i + 2) // PER_PAGE, mask=i + 2 < n_full, other=0)
                s = warpgroup_mma(
                    q_tile, k_tiles.index(i & 1).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                # The two waits for barriers end basic blocks: what stands between them stays between them.
                mbarrier.wait(v_bars.index((i + 1) & 1), ((i - 1) >> 1) & 1)
                acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
                acc = warpgroup_mma(p, v_tiles.index((i + 1) & 1), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
                weights = gl.convert_layout(weights.to(dtype), OPERAND)
                weights, total = warpgroup_mma_wait(1, deps=[weights, total])
                mbarrier.wait(k_bars.index((i + 1) & 1), ((i + 1) >> 1) & 1, i + 1 < n_full)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                p = weights
                gl.thread_barrier()
                _issue(
                    i + 2, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page, next_page, HKV,
                    PAGE, OWN, CP, True,
                )  # fmt: skip
                page = next_page
            for i in range(gl.maximum(n_full, 1), n_units):
                async_copy.wait_group(1)
                _arrived()
                s = warpgroup_mma(
                    q_tile, k_tiles.index(i & 1).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                mbarrier.wait(v_bars.index((i + 1) & 1), ((i - 1) >> 1) & 1, i == n_full)
                acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
                acc = warpgroup_mma(p, v_tiles.index((i + 1) & 1), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                s = _see(s, i, n_full, geometry, job, b_beam, OWN, BLOCK_N, MMA_S)
                weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
                weights = gl.convert_layout(weights.to(dtype), OPERAND)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                p = weights
                gl.thread_barrier()
                _issue(
                    i + 2, n_full, n_units, k_tiles, v_tiles, k_bars, v_bars, keys, values, job, geometry, first, page, page, HKV,
                    PAGE, OWN, CP, True,
                )  # fmt: skip
            async_copy.wait_group(0)
            _arrived()
            mbarrier.wait(v_bars.index((n_units + 1) & 1), ((n_units - 1) >> 1) & 1, n_units == n_full)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, v_tiles.index((n_units + 1) & 1), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        gl.thread_barrier()
        for stage in gl.static_range(2):
            mbarrier.invalidate(k_bars.index(stage))
            mbarrier.invalidate(v_bars.index(stage))

        in_rows = b_beam < width
        row = (row0 + b_beam).to(gl.int64)
        live = gl.load(p_slots + row, mask=b_beam < width_served, other=-1) >= 0
        total = gl.where(live, total, 0.0)
        # A padding row has seen nothing, or has met the prompt with a query of zeros.
        factor = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
        acc = acc * gl.convert_layout(factor, ROWS_O)[:, None]
        if SPLITS > 1:
            out = i_s.to(gl.int64) * N * HQ + row * HQ + i_h * G + (i_t * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS_S)) % G
            lse = gl.where(total > 0.0, peak + gl.log2(gl.where(total > 0.0, total, 1.0)), -float("inf"))
            gl.store(p_part_lse + out, lse, mask=in_rows)
            out = gl.convert_layout(out, ROWS_O)
            o_c = gl.arange(0, D, layout=gl.SliceLayout(0, MMA_O))
            mask = gl.convert_layout(in_rows, ROWS_O)[:, None] & (o_c < D)[None, :]
            gl.store(p_o + out[:, None] * D + o_c[None, :], acc, mask=mask)
        else:
            # Through shared memory, so that the stores are of 16 bytes.
            q_tile.store(acc.to(dtype))
            gl.thread_barrier()
            beam = (i_t * BLOCK_M + o_m) // G
            out = (row0 + beam).to(gl.int64) * HQ + i_h * G + (i_t * BLOCK_M + o_m) % G
            mask = (beam < width)[:, None] & (o_d < D)[None, :]
            gl.store(p_o + out[:, None] * D + o_d[None, :], q_tile.load(CP), mask=mask)


@gluon.jit
def _add(a, b):
    return a + b


def supports(q: Tensor, k_cache: Tensor, records_k: Tensor) -> bool:
    """Whether the Hopper kernel can serve these tensors: bf16 or fp16, heads of 64, 128 or 256, pages of at least 64."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HEAD_SIZES
        and k_cache.shape[1] >= BLOCK_N
        and k_cache.shape[1] & (k_cache.shape[1] - 1) == 0
        and k_cache.shape[0] > 0
        and records_k.dtype == q.dtype
    )


def beam_attention_hopper(
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
    splits: int | None = None,
) -> Tensor:
    """`beam_attention_triton` for Hopper; call it where `supports` says so. Same arguments, contract and errors."""
    check_attention(
        q, k, v, k_cache, v_cache, page_table, records_k, records_v, slots, ancestors, cu_rows, prompts, depths
    )  # fmt: skip
    N, HQ, D = q.shape
    HKV, page_size = k.shape[1], k_cache.shape[1]
    G, B = HQ // HKV, cu_rows.shape[0] - 1
    o = torch.empty(N, HQ, D, dtype=q.dtype, device=q.device)
    if N == 0 or B == 0:
        return o.zero_()
    own = BLOCK_M // G if BLOCK_M % G == 0 else (BLOCK_M - 1) // G + 2
    if splits is None:
        units = page_table.shape[1] * page_size // BLOCK_N
        splits = choose_splits(triton.cdiv(N * G, BLOCK_M) * HKV, units, q.device)
    part_lse = torch.empty(splits, N, HQ, dtype=torch.float32, device=q.device) if splits > 1 else None
    part_o = torch.empty(splits, N, HQ, D, dtype=torch.float32, device=q.device) if splits > 1 else None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(cache.view(-1, HKV * D), [BLOCK_N, D], layout) for cache in (k_cache, v_cache)
    )
    scale = D**-0.5 if scale is None else scale
    beam_attention_hopper_kernel[(N * G // BLOCK_M + B, HKV, splits)](
        q, k, v, k_desc, v_desc, k_cache, v_cache, page_table, prompt_lens, records_k, records_v, slots, ancestors, cu_rows,
        prompts, depths, o if part_o is None else part_o, part_lse, q.stride(0), k.stride(0), v.stride(0),
        page_table.stride(0), ancestors.stride(0), scale * math.log2(math.e), N, B,
        HKV=HKV, G=G, D=D, PAGE=page_size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, OWN=own, SPLITS=splits,
        BLOCK_B=max(32, triton.next_power_of_2(B)), num_warps=NUM_WARPS,
    )  # fmt: skip
    if part_o is not None:
        merge_splits(part_o, part_lse, o, cu_rows)
    return o
