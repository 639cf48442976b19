"""The same step for Hopper (Triton Gluon), by warps that have their own jobs.

A program stays on its multiprocessor and takes one tile after another: 128 rows (beam, head of the group) of
one request and key head, over one split of its prompt. Two warpgroups compute, 64 rows each, each at its own
pace, so that one's softmax runs beside the other's products. A third one brings in what they need, ahead of
them and across the border between two tiles, through one ring of equal stages in shared memory: one of its
warps streams the prompt's pages (copy engine), two gather rows (cp.async), one writes the records. Which row of
memory each own key comes from is looked up before its stage is free, an address for each.

Of two splits, the second's program waits for what the first's leaves in device memory, and adds it to its own. The
first's has the lower number, so it has begun before, and waits for nobody. More splits leave their parts for a launch
of its own.

Units of a tile, in order: first 64 keys of the prompt that may be incomplete, then whole ones, by the copy
engine from their pages; then the beams' own keys, gathered row by row. Of an own stage each
warpgroup has 32 keys, those of its own beams: for each depth the ancestors of its beams, then their new keys.
Nothing of a prompt comes from the kernel before: tiles are looked up, and the ring is filled, while it still runs.
Stages come in the order in which they are needed: K_0, K_1, V_0, K_2, V_1, ..., V_last.

Scores of a unit are computed while the weighted values of the unit before are still being summed:

    issue S_i = Q K_i^T;  O *= alpha_(i-1), where a peak has risen;  issue O += P_(i-1) V_(i-1);  wait S_i;
    softmax to P_i, alpha_i;  wait O
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onela.ops.attention._decode_hopper_loaders import gather_rows, stream_units, write_records
from onela.ops.attention._decode_hopper_tiles import (
    FIRST_OWN,
    LIMIT,
    N_OWN,
    N_PROMPT,
    NUM_INFO,
    OWN_UNIT,
    ROW0,
    ROWS,
    START,
    UNIT,
    WIDTH,
    count_items,
    stage_at,
)

# By how many powers of two a score may pass its row's peak before what was summed is scaled down to it.
LAG = gl.constexpr(8.0)


@gluon.constexpr_function
def _rows_layout(D, first, second):
    """The layout of 64 rows of a product, but that two bits of the columns lie in the lanes that are given."""
    low = [bit for bit in (2, 4, 8, 16) if bit not in (first, second)]
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1],
            *([0, bit] for bit in low),
            [8, 0],
            *([0, 1 << i] for i in range(5, D.bit_length() - 1)),
        ],
        lane_bases=[[0, first], [0, second], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, D],
    )


@gluon.jit
def _softmax(s, peak, total, scale_log2):
    """One unit of the online softmax: weights, new peak and sum, and the factor on what was summed before.

    A row keeps its peak until that is passed by eight powers of two, so that most units leave all factors at one.
    Weights may then reach 256. What they are divided by in the end is summed over the same peak.
    """
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale_log2)
    new_peak = gl.where(new_peak - peak > LAG, new_peak, peak)
    p = gl.exp2(s * scale_log2 - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    return p, new_peak, total * alpha + gl.sum(p, 1), alpha


@gluon.constexpr_function
def _rescale_asm(N):
    """PTX that multiplies N numbers of a thread, of two rows, by their factors, unless all of the warp's are one."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * N + i};" for i in range(N))
    return (
        "{ .reg .pred p, q; "
        f"setp.neu.f32 p, ${2 * N}, 0f3F800000; setp.neu.f32 q, ${2 * N + 2}, 0f3F800000; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_operands(N):
    return ",".join(["=f"] * N + [str(i) for i in range(N)] + ["f"] * N)


@gluon.jit
def _rescale(acc, alpha):
    """Sums times the factors of their rows. A warp skips it where all of its factors are one: with conditions of the
    language that would take a barrier."""
    # A product's layout: two columns of a row, then two of the row eight below. A thread holds D / 2 numbers.
    HELD: gl.constexpr = acc.shape[1] // 2
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        _rescale_asm(HELD), _rescale_operands(HELD), [acc, factors], dtype=gl.float32, is_pure=True, pack=HELD
    )


@gluon.jit
def _release(bar):
    """Give a stage back, each thread for itself: `mbarrier.arrive` would have the warps meet first."""
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _scores(held, queries, keys, zeros, HELD: gl.constexpr):
    """Issue the scores of a unit; the queries' first HELD columns are in registers, to read them once a tile."""
    D: gl.constexpr = keys.shape[1]
    if HELD == 0:
        s = warpgroup_mma(queries, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    elif HELD == D:
        s = warpgroup_mma(held, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        first = keys.slice(0, HELD, dim=1).permute((1, 0))
        s = warpgroup_mma(held, first, zeros, use_acc=False, is_async=True)
        second = keys.slice(HELD, D - HELD, dim=1).permute((1, 0))
        s = warpgroup_mma(queries.slice(HELD, D - HELD, dim=1), second, s, is_async=True)
    return s


@gluon.jit
def _see(s, sources, first, o_m, start, G: gl.constexpr, OWN: gl.constexpr, MMA: gl.constexpr):
    """Scores of an own unit, -inf where a row does not see a key: another beam's, or none at all."""
    e = first + gl.arange(0, OWN_UNIT, layout=gl.SliceLayout(0, MMA))
    mine = (e % OWN)[None, :] == ((start + o_m) // G - start // G)[:, None]
    return gl.where((sources != 0)[None, :] & mine, s, -float("inf"))


@gluon.constexpr_function
def _flat_layout(D):
    """64 rows of a product as one row of numbers: four of each thread, then the next thread's."""
    blocks = [[128 << i] for i in range((D // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *blocks],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[16 * D], [32 * D]],
        block_bases=[],
        shape=[64 * D],
    )


@gluon.jit
def _hand_over(acc, peak, total, place, p_part_o, p_part_lse, p_flags):
    """Leave a warpgroup's sums, its rows' peaks and totals for the program of the other split, and say so."""
    D: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = _flat_layout(D)
    flat = acc.reshape([4, 2, 8, D // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([ROWS * D])
    flat = gl.convert_layout(flat, FLAT, assert_trivial=True)
    gl.store(p_part_o + place.to(gl.int64) * (ROWS * D) + gl.arange(0, ROWS * D, layout=FLAT), flat)
    o_m = gl.arange(0, ROWS, layout=peak.type.layout)
    gl.store(p_part_lse + place * (2 * ROWS) + o_m, peak)
    gl.store(p_part_lse + place * (2 * ROWS) + ROWS + o_m, total)
    gl.thread_barrier()
    gl.atomic_xchg(p_flags + place, 1, sem="release", scope="gpu")


@gluon.jit
def _take_over(acc, peak, total, place, p_part_o, p_part_lse, p_flags):
    """Wait for the other split's sums and add them to these; the flag is ready for the next launch afterwards."""
    D: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = _flat_layout(D)
    while gl.atomic_add(p_flags + place, 0, sem="acquire", scope="gpu") == 0:
        pass
    gl.thread_barrier()
    gl.atomic_xchg(p_flags + place, 0, sem="relaxed", scope="gpu")
    o_m = gl.arange(0, ROWS, layout=peak.type.layout)
    other_peak = gl.load(p_part_lse + place * (2 * ROWS) + o_m)
    other_total = gl.load(p_part_lse + place * (2 * ROWS) + ROWS + o_m)
    flat = gl.load(p_part_o + place.to(gl.int64) * (ROWS * D) + gl.arange(0, ROWS * D, layout=FLAT))
    other = flat.reshape([4, D // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([ROWS, D])
    other = gl.convert_layout(other, acc.type.layout, assert_trivial=True)
    new_peak = gl.maximum(peak, other_peak)
    factor = gl.exp2(peak - new_peak)
    other_factor = gl.exp2(other_peak - new_peak)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = (
        acc * gl.convert_layout(factor, ROWS_O)[:, None]
        + other * gl.convert_layout(other_factor, ROWS_O)[:, None]
    )
    return acc, total * factor + other_total * other_factor


@gluon.jit
def _write(acc, total, live, start, row0, width, i_h, p_o, HKV: gl.constexpr, G: gl.constexpr):
    """A warpgroup's sums over their totals, to the rows of the result; padding rows are zero."""
    D: gl.constexpr = acc.shape[1]
    HQ: gl.constexpr = HKV * G
    total = gl.where(live, total, 0.0)
    factor = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    # Four lanes of a row swap what they hold, so that each stores 16 bytes. One bit at a time, since that is done by
    # shuffles, without shared memory; what stands between keeps the two apart.
    HALFWAY: gl.constexpr = _rows_layout(D, 8, 4)
    OUT: gl.constexpr = _rows_layout(D, 8, 16)
    result = gl.convert_layout(acc.to(p_o.dtype.element_ty), HALFWAY)
    # A padding row may have met anything, NaN too; its bits are cleared.
    kept = gl.convert_layout(gl.where(live, -1, 0).to(gl.int16), gl.SliceLayout(1, HALFWAY))
    result = gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [result, gl.expand_dims(kept, 1).broadcast_to([ROWS, D])],
        dtype=result.dtype, is_pure=True, pack=2,
    )  # fmt: skip
    result = gl.convert_layout(result, OUT)
    m = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    out = (row0 + m // G).to(gl.int64) * HQ + i_h * G + m % G
    o_c = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    mask = (m // G < width)[:, None] & (o_c < D)[None, :]
    gl.store(p_o + out[:, None] * D + o_c[None, :], result, mask=mask)


@gluon.jit
def _compute(
    results, batch, shared, GROUP: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr,
    SPLITS: gl.constexpr, HELD: gl.constexpr, FUSED: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """One of the two computing warpgroups: 64 rows of every tile."""
    p_part_o, p_o, p_part_lse, p_flags, p_slots, scale_log2, N = results
    q_tile, ring, own_list, _lists, info, full, empty, _granted, q_full, q_empty = shared
    NW: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    HQ: gl.constexpr = HKV * G
    SHARED: gl.constexpr = ring.layout
    dtype: gl.constexpr = ring.dtype
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, UNIT, 16])
    MMA_OWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, OWN_UNIT, 16])
    MMA_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA_O, k_width=2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, MMA_S)
    ROWS_OWN: gl.constexpr = gl.SliceLayout(1, MMA_OWN)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, MMA_O)
    no_scores = gl.zeros([ROWS, UNIT], gl.float32, MMA_S)
    no_own = gl.zeros([ROWS, OWN_UNIT], gl.float32, MMA_OWN)
    o_m = gl.arange(0, ROWS, layout=ROWS_S)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    queries = q_tile.index(GROUP)
    num_tiles, items = count_items(batch, HKV, G, SPLITS, BLOCK_B)
    gdc_wait()
    place = 0
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        mbarrier.wait(q_full.index(GROUP), parity)
        stage, turn = stage_at(place, STAGES)
        mbarrier.wait(full.index(stage), turn)
        held = 0
        if HELD > 0:
            held = queries.slice(0, HELD, dim=1).load(
                gl.DotOperandLayout(operand_index=0, parent=MMA_S, k_width=2)
            )
        s = _scores(held, queries, ring.index(stage), no_scores, HELD)
        told = info.index(parity ^ 1)._reinterpret(gl.int32, [NUM_INFO, 1], own_list.layout)
        parity ^= 1
        num_prompt = gl.max(told.index(N_PROMPT).load(ONE), 0)
        num_own = gl.max(told.index(N_OWN).load(ONE), 0)
        own_key = gl.max(told.index(FIRST_OWN).load(ONE), 0) * OWN_UNIT
        limit = gl.max(told.index(LIMIT).load(ONE), 0)
        start = gl.max(told.index(START).load(ONE), 0) + GROUP * ROWS
        row0 = gl.max(told.index(ROW0).load(ONE), 0)
        width = gl.max(told.index(WIDTH).load(ONE), 0)
        beam = (start + o_m) // G
        slot = gl.load(p_slots + row0 + beam, mask=beam < width, other=-1)
        i_h = (item // num_tiles) % HKV
        i_s = item // (num_tiles * HKV)

        acc = gl.zeros([ROWS, D], gl.float32, MMA_O)
        peak = gl.full([ROWS], -1.0e30, gl.float32, ROWS_S)
        total = gl.zeros([ROWS], gl.float32, ROWS_S)
        s = warpgroup_mma_wait(0, deps=[s])
        _release(empty.index(stage))
        o_n = gl.arange(0, UNIT, layout=gl.SliceLayout(0, MMA_S))
        s = gl.where((o_n < limit)[None, :], s, -float("inf"))
        p, peak, total, alpha = _softmax(s, peak, total, scale_log2)
        p = gl.convert_layout(p.to(dtype), OPERAND)
        place += 1
        stage, turn = stage_at(place, STAGES)
        mbarrier.wait(full.index(stage), turn)
        for _ in range(1, num_prompt):
            # The keys of unit i are there.
            s = _scores(held, queries, ring.index(stage), no_scores, HELD)
            k_stage = stage
            v_stage, turn = stage_at(place + 1, STAGES)
            # The waits for copies end basic blocks: what stands between them stays between them.
            mbarrier.wait(full.index(v_stage), turn)
            acc = _rescale(acc, alpha)
            acc = warpgroup_mma(p, ring.index(v_stage), acc, is_async=True)
            place += 2
            stage, turn = stage_at(place, STAGES)
            s = warpgroup_mma_wait(1, deps=[s])
            _release(empty.index(k_stage))
            weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
            weights = gl.convert_layout(weights.to(dtype), OPERAND)
            weights, total = warpgroup_mma_wait(1, deps=[weights, total])
            # What comes next: the next unit's keys, or the last one's values.
            mbarrier.wait(full.index(stage), turn)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            _release(empty.index(v_stage))
            p = weights
        # What stands next is waited for: the first own keys, or the last values.
        if num_own > 0:
            fence_async_shared()
            own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
            s_own = warpgroup_mma(queries, own.permute((1, 0)), no_own, use_acc=False, is_async=True)
            sources = own_list.index(stage).slice(GROUP * OWN_UNIT, OWN_UNIT).load(gl.SliceLayout(0, MMA_OWN))
            v_stage, turn = stage_at(place + 1, STAGES)
            mbarrier.wait(full.index(v_stage), turn)
            acc = _rescale(acc, alpha)
            acc = warpgroup_mma(p, ring.index(v_stage), acc, is_async=True)
            s_own = warpgroup_mma_wait(1, deps=[s_own])
            _release(empty.index(stage))
            mbarrier.arrive(q_empty.index(GROUP), count=1, pred=num_own == 1)
            own_m = gl.arange(0, ROWS, layout=ROWS_OWN)
            own_peak = gl.convert_layout(peak, ROWS_OWN)
            own_total = gl.convert_layout(total, ROWS_OWN)
            s_own = _see(s_own, sources, own_key, own_m, start, G, OWN, MMA_OWN)
            p_own, own_peak, own_total, own_alpha = _softmax(s_own, own_peak, own_total, scale_log2)
            p_own = gl.convert_layout(p_own.to(dtype), OPERAND)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            _release(empty.index(v_stage))
            place += 2
            for i in range(1, num_own):
                stage, turn = stage_at(place, STAGES)
                mbarrier.wait(full.index(stage), turn)
                fence_async_shared()
                own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
                s_own = warpgroup_mma(queries, own.permute((1, 0)), no_own, use_acc=False, is_async=True)
                sources = (
                    own_list.index(stage).slice(GROUP * OWN_UNIT, OWN_UNIT).load(gl.SliceLayout(0, MMA_OWN))
                )
                v_stage, turn = stage_at(place + 1, STAGES)
                mbarrier.wait(full.index(v_stage), turn)
                fence_async_shared()
                acc = _rescale(acc, own_alpha)
                own = ring.index(v_stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
                acc = warpgroup_mma(p_own, own, acc, is_async=True)
                s_own = warpgroup_mma_wait(1, deps=[s_own])
                _release(empty.index(stage))
                mbarrier.arrive(q_empty.index(GROUP), count=1, pred=i == num_own - 1)
                s_own = _see(s_own, sources, own_key + i * OWN_UNIT, own_m, start, G, OWN, MMA_OWN)
                weights, own_peak, own_total, own_alpha = _softmax(s_own, own_peak, own_total, scale_log2)
                acc, p_own = warpgroup_mma_wait(0, deps=[acc, p_own])
                _release(empty.index(v_stage))
                place += 2
                p_own = gl.convert_layout(weights.to(dtype), OPERAND)
            stage, turn = stage_at(place, STAGES)
            mbarrier.wait(full.index(stage), turn)
            fence_async_shared()
            acc = _rescale(acc, own_alpha)
            own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
            acc = warpgroup_mma(p_own, own, acc, is_async=True)
            acc, p_own = warpgroup_mma_wait(0, deps=[acc, p_own])
            peak = gl.convert_layout(own_peak, ROWS_S)
            total = gl.convert_layout(own_total, ROWS_S)
        else:
            mbarrier.arrive(q_empty.index(GROUP), count=1)
            acc = _rescale(acc, alpha)
            acc = warpgroup_mma(p, ring.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        _release(empty.index(stage))
        place += 1

        live = slot >= 0
        if FUSED:
            # The first split's program comes first in order, so that nobody waits for one that waits for its place.
            pair = (item % (num_tiles * HKV)) * 2 + GROUP
            if i_s == 0:
                _hand_over(acc, peak, total, pair, p_part_o, p_part_lse, p_flags)
            else:
                acc, total = _take_over(acc, peak, total, pair, p_part_o, p_part_lse, p_flags)
                _write(acc, total, live, start, row0, width, i_h, p_o, HKV, G)
        elif SPLITS > 1:
            total = gl.where(live, total, 0.0)
            factor = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
            m = start + o_m
            out = i_s.to(gl.int64) * N * HQ + (row0 + m // G).to(gl.int64) * HQ + i_h * G + m % G
            lse = gl.where(total > 0.0, peak + gl.log2(gl.where(total > 0.0, total, 1.0)), -float("inf"))
            in_rows = m // G < width
            gl.store(p_part_lse + out, lse, mask=in_rows)
            out = gl.convert_layout(out, ROWS_O)
            o_c = gl.arange(0, D, layout=gl.SliceLayout(0, MMA_O))
            mask = gl.convert_layout(in_rows, ROWS_O)[:, None] & (o_c < D)[None, :]
            # A padding row may have met anything, NaN too.
            acc = gl.where(
                gl.convert_layout(live, ROWS_O)[:, None],
                acc * gl.convert_layout(factor, ROWS_O)[:, None],
                0.0,
            )
            gl.store(p_part_o + out[:, None] * D + o_c[None, :], acc, mask=mask)
        else:
            _write(acc, total, live, start, row0, width, i_h, p_o, HKV, G)


@gluon.jit
def beam_attention_hopper_kernel(
    p_q, q_desc, p_k, p_v, k_desc, v_desc, p_v_cache, p_page_table, p_prompt_lens, p_records_k, p_records_v, p_slots,
    p_ancestors, p_cu_rows, p_prompts, p_depths, p_part_o, p_o, p_part_lse, p_flags, stride_q, stride_k, stride_v,
    stride_table, stride_ancestors, scale_log2, N, B, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, OWN: gl.constexpr, SPLITS: gl.constexpr, FUSED: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_B: gl.constexpr, HELD: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes every so-many-th tile, head and split."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_tile = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
    ring = gl.allocate_shared_memory(dtype, [STAGES, UNIT, D], SHARED)
    own_list = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * OWN_UNIT], PLAIN)
    lists = gl.allocate_shared_memory(gl.int64, [2, 2 * OWN_UNIT], PLAIN)
    info = gl.allocate_shared_memory(gl.int32, [2, NUM_INFO], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    granted = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 * 32 * gl.num_warps())
        mbarrier.init(granted.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (q_tile, ring, own_list, lists, info, full, empty, granted, q_full, q_empty)
    batch = (p_page_table, p_prompt_lens, p_cu_rows, p_prompts, p_depths, stride_table, B)
    gathers = (
        p_q, q_desc, p_k, p_v, p_v_cache, p_records_k, p_records_v, p_slots, p_ancestors, stride_q, stride_k, stride_v,
        stride_ancestors,
    )  # fmt: skip
    records = (p_k, p_v, p_records_k, p_records_v, p_slots, stride_k, stride_v)
    results = (p_part_o, p_o, p_part_lse, p_flags, p_slots, scale_log2, N)
    ZERO: gl.constexpr = SPLITS == 1 or FUSED
    gl.warp_specialize(
        [
            (_compute, (results, batch, shared, 0, HKV, G, OWN, SPLITS, HELD, FUSED, BLOCK_B)),
            (_compute, (results, batch, shared, 1, HKV, G, OWN, SPLITS, HELD, FUSED, BLOCK_B)),
            (gather_rows, (gathers, batch, shared, HKV, G, PAGE, OWN, SPLITS, BLOCK_B)),
            (stream_units, ((k_desc, v_desc), batch, shared, HKV, G, PAGE, OWN, SPLITS, BLOCK_B)),
            (write_records, (records, batch, shared, p_o, N, HKV, G, OWN, SPLITS, BLOCK_B, ZERO)),
        ],
        [4, 2, 1, 1],
        [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
