"""The same step for Hopper (Triton Gluon): the prompt's pages by TMA, both products by asynchronous wgmma.

A program holds 128 rows (beam, head of the group) of one request and key head and walks over units of 64
keys. First come the full units of the prompt, which the copy engine brings in from their pages. The rest are
gathered row by row with cp.async, as one flat list in which every key says which beam may see it: for each
depth the ancestors of the tile's beams, then the beams' own new keys, then the prompt's last, incomplete
unit.

Scores of a unit are computed while the weighted values of the unit before are still being summed:

    issue S_i = Q K_i^T;  O *= alpha_(i-1);  issue O += P_(i-1) V_(i-1);  wait S_i;  softmax to P_i, alpha_i;
    wait O

Keys have three buffers and values two; the next copies start right behind the issue of S_i, where the tensor
cores are busy.
"""

from __future__ import annotations

import triton
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


@gluon.constexpr_function
def _power_of_two(n):
    return triton.next_power_of_2(n)


@gluon.jit
def _gather(
    unit, n_full, buffer, extra_list, p_cache, p_new, stride_new, p_records, i_h, n_own, first_extra,
    HKV: gl.constexpr, CP: gl.constexpr,
):  # fmt: skip
    """Start copying the rows of a gathered unit into `buffer`; rows that nobody sees come as zeros."""
    BLOCK_N: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    e = (first_extra + unit - n_full) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, CP))
    source = extra_list.index(unit - n_full).load(gl.SliceLayout(1, CP))
    row = source.to(gl.int64)
    at = gl.where(source < -1, p_new + (-2 - row) * stride_new + i_h * D, p_records + (row * HKV + i_h) * D)
    at = gl.where(e >= n_own, p_cache + (row * HKV + i_h) * D, at)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    mask = (source != -1)[:, None] & (o_d < D)[None, :]
    async_copy.async_copy_global_to_shared(buffer, at[:, None] + o_d[None, :], mask=mask)


@gluon.jit
def _issue(
    unit, n_full, n_units, tiles, bars, stage, page, first, extra_list, source, i_h, n_own, first_extra,
    HKV: gl.constexpr, PAGE: gl.constexpr, CP: gl.constexpr,
):  # fmt: skip
    """Start bringing in a unit's keys (or values): its page, or its rows one by one; past the last, nothing."""
    BLOCK_N: gl.constexpr = tiles.shape[1]
    D: gl.constexpr = tiles.shape[2]
    desc, p_cache, p_new, stride_new, p_records = source
    token = page * PAGE + ((first + unit) & (PAGE // BLOCK_N - 1)) * BLOCK_N
    bar = bars.index(stage)
    tile = tiles.index(stage)
    # A copy whose condition is false does not take place, whatever its arguments.
    mbarrier.expect(bar, BLOCK_N * D * 2, unit < n_full)
    tma.async_copy_global_to_shared(desc, [token, i_h * D], bar, tile, unit < n_full)
    if (unit >= n_full) & (unit < n_units):
        _gather(
            unit,
            n_full,
            tile,
            extra_list,
            p_cache,
            p_new,
            stride_new,
            p_records,
            i_h,
            n_own,
            first_extra,
            HKV,
            CP,
        )


@gluon.jit
def _softmax(s, peak, total, scale_log2):
    """One unit of the online softmax: weights, new peak and sum, and the factor on what was summed before."""
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    return p, new_peak, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _see(
    s, unit, n_full, extra_list, n_own, first_extra, beam0, b_beam,
    OWN: gl.constexpr, BLOCK_N: gl.constexpr, MMA_S: gl.constexpr,
):  # fmt: skip
    """Scores of a gathered unit, -inf where a row does not see a key."""
    e = (first_extra + unit - n_full) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA_S))
    source = extra_list.index(unit - n_full).load(gl.SliceLayout(0, MMA_S))
    mine = (e >= n_own)[None, :] | ((beam0 + e % OWN)[None, :] == b_beam[:, None])
    return gl.where((source != -1)[None, :] & mine, s, -float("inf"))


@gluon.jit
def _arrived():
    """Make what cp.async has brought in visible to the tensor cores of every warp."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def beam_attention_hopper_kernel(
    p_q, p_k, p_v, k_desc, v_desc, p_k_cache, p_v_cache, p_page_table, p_prompt_lens, p_records_k,
    p_records_v, p_slots, p_ancestors, p_cu_rows, p_prompts, p_depths, p_o, p_part_lse, stride_q, stride_k,
    stride_v, stride_table, stride_ancestors, scale_log2, N, B, HKV: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OWN: gl.constexpr,
    EXTRA: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
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
    OWN_ROWS: gl.constexpr = _power_of_two(OWN)
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
    if SPLITS == 1:  # noqa: SIM102 (known when compiled)
        if gl.program_id(0) == 0:
            # Rows past the last request give zeros.
            for m in range(gl.load(p_cu_rows + B) * G, N * G, BLOCK_M):
                at = ((m + o_m) // G).to(gl.int64) * HQ + i_h * G + (m + o_m) % G
                zeros = gl.zeros([BLOCK_M, D], dtype, CP)
                gl.store(
                    p_o + at[:, None] * D + o_d[None, :],
                    zeros,
                    mask=(m + o_m < N * G)[:, None] & (o_d < D)[None, :],
                )
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

        # Units of this split: n_full of the prompt from unit `first` on, then gathered ones from
        # `first_extra` on.
        whole = length // BLOCK_N
        tail = length - whole * BLOCK_N
        n_own = (depth + 1) * OWN
        units = whole + (n_own + tail + BLOCK_N - 1) // BLOCK_N
        first_unit = (units * i_s) // SPLITS
        n_units = (units * (i_s + 1)) // SPLITS - first_unit
        first = gl.minimum(first_unit, whole)
        first_extra = first_unit - first
        n_full = gl.minimum(first_unit + n_units, whole) - first

        q_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, D], SHARED)
        k_tiles = gl.allocate_shared_memory(dtype, [3, BLOCK_N, D], SHARED)
        v_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], SHARED)
        extra_list = gl.allocate_shared_memory(
            gl.int32, [EXTRA, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        k_bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(3):
            mbarrier.init(k_bars.index(stage), count=1)
        for stage in gl.static_range(2):
            mbarrier.init(v_bars.index(stage), count=1)
        row = (row0 + (i_t * BLOCK_M + o_m) // G).to(gl.int64)
        in_m = (i_t * BLOCK_M + o_m) // G < width_served
        live = in_m & (gl.load(p_slots + row, mask=in_m, other=-1) >= 0)
        head = i_h * G + (i_t * BLOCK_M + o_m) % G
        async_copy.async_copy_global_to_shared(
            q_tile,
            (p_q + row * stride_q + head * D)[:, None] + o_d[None, :],
            mask=live[:, None] & (o_d < D)[None, :],
        )
        page0 = gl.load(p_table + first // PER_PAGE, mask=n_full > 0, other=0)
        page1 = gl.load(p_table + (first + 1) // PER_PAGE, mask=n_full > 1, other=0)
        page2 = gl.load(p_table + (first + 2) // PER_PAGE, mask=n_full > 2, other=0)
        tail_page = gl.load(p_table + whole // PER_PAGE, mask=tail > 0, other=0)
        tail_token = tail_page * PAGE + (whole & (PER_PAGE - 1)) * BLOCK_N

        # Where each gathered key lies: -1 nowhere, a row of the cache, a record, or (below -1) the
        # row of a new key.
        found = ()
        for u in gl.static_range(EXTRA):
            e = (first_extra + u) * BLOCK_N + gl.arange(0, BLOCK_N, layout=LIST)
            j = e // OWN
            beam = beam0 + e % OWN
            inside = (j <= depth) & (beam < width_served)
            own_row = (row0 + beam).to(gl.int64)
            slot = gl.load(p_slots + own_row, mask=inside, other=-1)
            ancestor = gl.load(
                p_ancestors + own_row * stride_ancestors + j, mask=inside & (j < depth), other=-1
            )
            at = gl.where(j == depth, -2 - (row0 + beam), ancestor)
            at = gl.where(slot >= 0, at, -1)
            found = found + (gl.where(e < n_own, at, gl.where(e - n_own < tail, tail_token + e - n_own, -1)),)  # noqa: RUF005
        for u in gl.static_range(EXTRA):
            extra_list.index(u).store(found[u])
        fence_async_shared()
        gl.thread_barrier()

        keys = (k_desc, p_k_cache, p_k, stride_k, p_records_k)
        values = (v_desc, p_v_cache, p_v, stride_v, p_records_v)
        _issue(
            0,
            n_full,
            n_units,
            k_tiles,
            k_bars,
            0,
            page0,
            first,
            extra_list,
            keys,
            i_h,
            n_own,
            first_extra,
            HKV,
            PAGE,
            CP,
        )
        async_copy.commit_group()
        _issue(
            1,
            n_full,
            n_units,
            k_tiles,
            k_bars,
            1,
            page1,
            first,
            extra_list,
            keys,
            i_h,
            n_own,
            first_extra,
            HKV,
            PAGE,
            CP,
        )
        _issue(
            0,
            n_full,
            n_units,
            v_tiles,
            v_bars,
            0,
            page0,
            first,
            extra_list,
            values,
            i_h,
            n_own,
            first_extra,
            HKV,
            PAGE,
            CP,
        )
        async_copy.commit_group()

        # The last split writes the records; a beam whose rows begin in the tile before is written there.
        o_r = gl.arange(0, OWN_ROWS, layout=gl.SliceLayout(1, CP))
        beam = beam0 + o_r
        mine = (
            (o_r < OWN)
            & (beam < width_served)
            & (beam * G >= i_t * BLOCK_M)
            & (beam * G < (i_t + 1) * BLOCK_M)
        )
        record = gl.load(p_slots + row0 + beam, mask=mine & (i_s == SPLITS - 1), other=-1).to(gl.int64)
        recorded = (record >= 0)[:, None] & (o_d < D)[None, :]
        new_row = (row0 + beam).to(gl.int64)
        new_k = gl.load(p_k + (new_row * stride_k + i_h * D)[:, None] + o_d[None, :], mask=recorded)
        new_v = gl.load(p_v + (new_row * stride_v + i_h * D)[:, None] + o_d[None, :], mask=recorded)
        target = ((record * HKV + i_h) * D)[:, None] + o_d[None, :]

        b_beam = (i_t * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS_S)) // G
        acc = gl.zeros([BLOCK_M, D], gl.float32, MMA_O)
        peak = gl.full([BLOCK_M], -1.0e30, gl.float32, ROWS_S)
        total = gl.zeros([BLOCK_M], gl.float32, ROWS_S)
        no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA_S)
        if n_units > 0:
            async_copy.wait_group(1)
            _arrived()
            mbarrier.wait(k_bars.index(0), 0, n_full > 0)
            s = warpgroup_mma(
                q_tile, k_tiles.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            _issue(
                2,
                n_full,
                n_units,
                k_tiles,
                k_bars,
                2,
                page2,
                first,
                extra_list,
                keys,
                i_h,
                n_own,
                first_extra,
                HKV,
                PAGE,
                CP,
            )
            async_copy.commit_group()
            gl.store(p_records_k + target, new_k, mask=recorded)
            gl.store(p_records_v + target, new_v, mask=recorded)
            s = warpgroup_mma_wait(0, deps=[s])
            if n_full == 0:
                s = _see(s, 0, n_full, extra_list, n_own, first_extra, beam0, b_beam, OWN, BLOCK_N, MMA_S)
            p, peak, total, alpha = _softmax(s, peak, total, scale_log2)
            p = gl.convert_layout(p.to(dtype), OPERAND)
            mbarrier.wait(k_bars.index(1), 0, n_full > 1)
            page3 = gl.load(p_table + (first + 3) // PER_PAGE, mask=n_full > 3, other=0)
            for i in range(1, n_full):
                s = warpgroup_mma(
                    q_tile, k_tiles.index(i % 3).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                # Every warp is past the products of the turn before: their buffers are free.
                gl.thread_barrier()
                _issue(
                    i + 2, n_full, n_units, k_tiles, k_bars, (i + 2) % 3, page3, first, extra_list, keys, i_h,
                    n_own, first_extra, HKV, PAGE, CP,
                )  # fmt: skip
                _issue(
                    i, n_full, n_units, v_tiles, v_bars, i & 1, page1, first, extra_list, values, i_h, n_own,
                    first_extra, HKV, PAGE, CP,
                )  # fmt: skip
                async_copy.commit_group()
                page1 = page2
                page2 = page3
                page3 = gl.load(p_table + (first + i + 3) // PER_PAGE, mask=i + 3 < n_full, other=0)
                # The waits for copies end basic blocks: what stands between them stays between them.
                mbarrier.wait(v_bars.index((i - 1) & 1), ((i - 1) >> 1) & 1)
                acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
                acc = warpgroup_mma(p, v_tiles.index((i - 1) & 1), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
                weights = gl.convert_layout(weights.to(dtype), OPERAND)
                weights, total = warpgroup_mma_wait(1, deps=[weights, total])
                mbarrier.wait(k_bars.index((i + 1) % 3), ((i + 1) // 3) & 1, i + 1 < n_full)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                p = weights
            for i in range(gl.maximum(n_full, 1), n_units):
                async_copy.wait_group(1)
                _arrived()
                s = warpgroup_mma(
                    q_tile, k_tiles.index(i % 3).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                _issue(
                    i + 2, n_full, n_units, k_tiles, k_bars, (i + 2) % 3, page3, first, extra_list, keys, i_h,
                    n_own, first_extra, HKV, PAGE, CP,
                )  # fmt: skip
                _issue(
                    i, n_full, n_units, v_tiles, v_bars, i & 1, page1, first, extra_list, values, i_h, n_own,
                    first_extra, HKV, PAGE, CP,
                )  # fmt: skip
                async_copy.commit_group()
                async_copy.wait_group(1)
                _arrived()
                mbarrier.wait(v_bars.index((i - 1) & 1), ((i - 1) >> 1) & 1, i == n_full)
                acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
                acc = warpgroup_mma(p, v_tiles.index((i - 1) & 1), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                s = _see(s, i, n_full, extra_list, n_own, first_extra, beam0, b_beam, OWN, BLOCK_N, MMA_S)
                weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                p = gl.convert_layout(weights.to(dtype), OPERAND)
            async_copy.wait_group(0)
            _arrived()
            mbarrier.wait(v_bars.index((n_units - 1) & 1), ((n_units - 1) >> 1) & 1, n_units == n_full)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, v_tiles.index((n_units - 1) & 1), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        gl.thread_barrier()
        for stage in gl.static_range(3):
            mbarrier.invalidate(k_bars.index(stage))
        for stage in gl.static_range(2):
            mbarrier.invalidate(v_bars.index(stage))

        in_rows = b_beam < width
        row = (row0 + b_beam).to(gl.int64)
        live = gl.load(p_slots + row, mask=b_beam < width_served, other=-1) >= 0
        total = gl.where(live, total, 0.0)
        # A padding row has seen nothing, or has met the prompt with a query of zeros.
        factor = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
        acc = acc * gl.convert_layout(factor, ROWS_O)[:, None]
        if SPLITS > 1:
            out = (
                i_s.to(gl.int64) * N * HQ
                + row * HQ
                + i_h * G
                + (i_t * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS_S)) % G
            )
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
