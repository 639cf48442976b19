"""Causal attention of new prompts for Hopper (Triton Gluon), by warps that have their own jobs.

A tile is 64 tokens of one prompt and two query heads that read the same key head: each of two warpgroups computes one
head's 64 rows, so both walk over the same keys, which are in shared memory once. A third one brings queries, keys and
values in by the copy engine, ahead of them and across the border between two tiles. Programs stay on their
multiprocessor and take one tile after another, the longest first, from a counter that they share.

The keys of a tile come in units, the last one first: it holds the tile's own tokens, and is the only one that needs
a mask. Stages come in the order in which they are needed: K_0, K_1, V_0, K_2, V_1, ..., V_last. Scores of a unit are
computed while the weighted values of the unit before are still being summed:

    issue S_i = Q K_i^T;  O *= alpha_(i-1);  issue O += P_(i-1) V_(i-1);  wait S_i;  softmax to P_i, alpha_i;
    wait O

The two warpgroups take turns in issuing, so that one's softmax runs beside the other's products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onela.ops.attention._decode_hopper_kernel import _rows_layout
from onela.ops.attention._decode_hopper_tiles import ROWS, stage_at

# What the loading warp tells the computing ones about a tile.
UNITS, FIRST, ROW0, LIVE, HEAD = (gl.constexpr(i) for i in range(5))
NUM_INFO = gl.constexpr(8)
# Rows that are cleared at once.
CLEAR = gl.constexpr(8)


@gluon.jit
def _tile_at(item, batch, PAIRS: gl.constexpr, UNIT: gl.constexpr):
    """Where an item's rows and keys stand. Items are chunks of 64 tokens, from the batch's last to its first, by pair
    of heads: so the tiles of a prompt come from the longest to the shortest.

    Returns: units of keys, the last one's first key, the tile's first row, the row behind its prompt, pair of heads.
    """
    p_chunks, p_cu_seqlens, num_chunks = batch
    chunk = num_chunks - 1 - item // PAIRS
    there = chunk >= 0
    sequence = gl.load(p_chunks + 2 * chunk, mask=there, other=0)
    number = gl.load(p_chunks + 2 * chunk + 1, mask=there, other=0)
    low = gl.load(p_cu_seqlens + sequence)
    high = gl.load(p_cu_seqlens + sequence + 1)
    units = (number * ROWS) // UNIT + 1
    return units, low + (units - 1) * UNIT, low + number * ROWS, high, item % PAIRS


@gluon.jit
def _copy(desc, row, column, ring, full, empty, place):
    """A unit of keys or values into its stage."""
    UNIT: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    stage, parity = stage_at(place, ring.shape[0])
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.expect(full.index(stage), UNIT * D * 2)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _copy_within(desc, row, column, ring, full, empty, place, seen, cleared, parity):
    """Values of which those behind the first `seen` are another prompt's, which may hold anything, NaN too: cleared."""
    UNIT: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    stage, turn = stage_at(place, ring.shape[0])
    mbarrier.wait(empty.index(stage), turn ^ 1)
    mbarrier.expect(cleared, UNIT * D * 2)
    tma.async_copy_global_to_shared(desc, [row, column], cleared, ring.index(stage))
    mbarrier.wait(cleared, parity)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = gl.arange(0, CLEAR, layout=gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(UNIT // CLEAR):
        if (part + 1) * CLEAR > seen:
            rows = ring.index(stage).slice(part * CLEAR, CLEAR)
            kept = (part * CLEAR + o_n < seen)[:, None]
            rows.store(gl.where(kept, rows.load(LAYOUT), gl.zeros([CLEAR, D], ring.dtype, LAYOUT)))
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _stream(streams, batch, shared, p_counter, G: gl.constexpr, PAIRS: gl.constexpr):
    """The warp that brings in what the others compute with, and tells them where it stands."""
    q_desc, k_desc, v_desc = streams
    q_tile, ring, info, full, empty, q_full, q_empty, _turns, cleared = shared
    UNIT: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    QUERIES: gl.constexpr = q_tile.shape[0] // 2
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_i = gl.arange(0, NUM_INFO, layout=ONE)
    items = batch[2] * PAIRS
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    place = 0
    turn = 0
    clears = 0
    units, last, row0, high, pair = _tile_at(item, batch, PAIRS, UNIT)
    while item < items:
        slot, parity = stage_at(turn, QUERIES)
        mbarrier.wait(q_empty.index(slot), parity ^ 1)
        told = gl.where(o_i == UNITS, units, gl.where(o_i == FIRST, row0 - last, pair))
        info.index(slot).store(gl.where(o_i == ROW0, row0, gl.where(o_i == LIVE, high - row0, told)))
        gl.thread_barrier()
        mbarrier.expect(q_full.index(slot), 2 * ROWS * D * 2)
        for group in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [row0, (2 * pair + group) * D], q_full.index(slot), q_tile.index(2 * slot + group)
            )
        turn += 1
        column = (2 * pair // G) * D
        _copy(k_desc, last, column, ring, full, empty, place)
        # The next tile is looked up while the ring is full.
        drawn = gl.atomic_add(p_counter, 1, sem="relaxed", scope="gpu")
        if drawn == items - 1:
            # Everybody draws once for each tile: this was the last time.
            gl.atomic_xchg(p_counter, 0, sem="relaxed", scope="gpu")
        item = programs + drawn
        next_units, next_last, next_row0, next_high, next_pair = _tile_at(item, batch, PAIRS, UNIT)
        row = last
        for u in range(1, units + 1):
            before = row
            if u < units:
                row -= UNIT
                _copy(k_desc, row, column, ring, full, empty, place + 2 * u - 1)
            v_place = place + 2 * u - (u == units).to(gl.int32)
            if before + UNIT > high:
                _copy_within(
                    v_desc, before, column, ring, full, empty, v_place, high - before, cleared, clears & 1
                )
                clears += 1
            else:
                _copy(v_desc, before, column, ring, full, empty, v_place)
        place += 2 * units
        units = next_units
        last = next_last
        row0 = next_row0
        high = next_high
        pair = next_pair
    slot, parity = stage_at(turn, QUERIES)
    mbarrier.wait(q_empty.index(slot), parity ^ 1)
    info.index(slot).store(gl.zeros([NUM_INFO], gl.int32, ONE))
    gl.thread_barrier()
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _lane_sums(p):
    """Sums of weights [rows, unit] that each of the four lanes of a row holds, [rows, 4]."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(s, peak, sums, scale_log2):
    """One unit of the online softmax: weights, new peak and sums, and the factor on what was summed before.

    The four lanes of a row meet for its peak; their sums [rows, 4] stay apart until the tile's end.
    """
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, new_peak, sums * factor[:, None] + _lane_sums(p), alpha


@gluon.jit
def _write(acc, total, o_row, live, column, p_o, HQ: gl.constexpr):
    """A warpgroup's sums over their totals, to the rows of the result that are its prompt's."""
    D: gl.constexpr = acc.shape[1]
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    # Four lanes of a row swap what they hold, so that each stores 16 bytes; one bit at a time goes by shuffles.
    HALFWAY: gl.constexpr = _rows_layout(D, 8, 4)
    OUT: gl.constexpr = _rows_layout(D, 8, 16)
    result = gl.convert_layout(acc.to(p_o.dtype.element_ty), HALFWAY)
    # What stands between keeps the two apart.
    result = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=True, pack=2
    )
    result = gl.convert_layout(result, OUT)
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    o_c = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    at = p_o + ((o_row + o_m).to(gl.int64) * (HQ * D) + column)[:, None] + o_c[None, :]
    gl.store(at, result, mask=(o_m < live)[:, None] & (o_c < D)[None, :])


@gluon.jit
def _compute(p_o, scale_log2, shared, GROUP: gl.constexpr, HQ: gl.constexpr):
    """One of the two computing warpgroups: one head's 64 rows of every tile."""
    q_tile, ring, info, full, empty, q_full, q_empty, turns, _cleared = shared
    NW: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = ring.shape[0]
    UNIT: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    QUERIES: gl.constexpr = q_tile.shape[0] // 2
    dtype: gl.constexpr = ring.dtype
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, UNIT, 16])
    MMA_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA_O, k_width=2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, MMA_S)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, MMA_O)
    no_scores = gl.zeros([ROWS, UNIT], gl.float32, MMA_S)
    o_m = gl.arange(0, ROWS, layout=ROWS_S)
    o_n = gl.arange(0, UNIT, layout=gl.SliceLayout(0, MMA_S))
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    place = 0
    turn = 0
    issues = 0
    mbarrier.wait(q_full.index(0), 0)
    told = info.index(0)._reinterpret(gl.int32, [NUM_INFO, 1], info.layout)
    units = gl.max(told.index(UNITS).load(ONE), 0)
    while units > 0:
        slot = turn % QUERIES
        queries = q_tile.index(2 * slot + GROUP)
        stage, fills = stage_at(place, STAGES)
        mbarrier.wait(full.index(stage), fills)
        s = warpgroup_mma(queries, ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        first = gl.max(told.index(FIRST).load(ONE), 0)
        row0 = gl.max(told.index(ROW0).load(ONE), 0)
        live = gl.max(told.index(LIVE).load(ONE), 0)
        pair = gl.max(told.index(HEAD).load(ONE), 0)
        acc = gl.zeros([ROWS, D], gl.float32, MMA_O)
        # Finite: every row sees a key of its first unit, its own.
        peak = gl.full([ROWS], -1.0e30, gl.float32, ROWS_S)
        sums = _lane_sums(no_scores)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage), count=1)
        s = gl.where(o_n[None, :] <= (o_m + first)[:, None], s, -float("inf"))
        p, peak, sums, alpha = _softmax(s, peak, sums, scale_log2)
        p = gl.convert_layout(p.to(dtype), OPERAND)
        place += 1
        stage, fills = stage_at(place, STAGES)
        mbarrier.wait(full.index(stage), fills)
        for _ in range(1, units):
            # The keys of unit i are there.
            mbarrier.wait(turns.index(GROUP), issues & 1)
            issues += 1
            s = warpgroup_mma(
                queries, ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            k_stage = stage
            v_stage, fills = stage_at(place + 1, STAGES)
            # The waits for copies end basic blocks: what stands between them stays between them.
            mbarrier.wait(full.index(v_stage), fills)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, ring.index(v_stage), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
            place += 2
            stage, fills = stage_at(place, STAGES)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(empty.index(k_stage), count=1)
            weights, peak, sums, alpha = _softmax(s, peak, sums, scale_log2)
            weights = gl.convert_layout(weights.to(dtype), OPERAND)
            weights, sums = warpgroup_mma_wait(1, deps=[weights, sums])
            # What comes next: the next unit's keys, or the last one's values.
            mbarrier.wait(full.index(stage), fills)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(empty.index(v_stage), count=1)
            p = weights
        mbarrier.arrive(q_empty.index(slot), count=1)
        acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
        acc = warpgroup_mma(p, ring.index(stage), acc, is_async=True)
        total = gl.convert_layout(gl.sum(sums, 1), ROWS_S)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(stage), count=1)
        place += 1
        _write(acc, total, row0, live, (2 * pair + GROUP) * D, p_o, HQ)
        turn += 1
        slot, parity = stage_at(turn, QUERIES)
        mbarrier.wait(q_full.index(slot), parity)
        told = info.index(slot)._reinterpret(gl.int32, [NUM_INFO, 1], info.layout)
        units = gl.max(told.index(UNITS).load(ONE), 0)


@gluon.jit
def prompt_attention_hopper_kernel(
    q_desc, k_desc, v_desc, p_o, p_cu_seqlens, p_chunks, p_chunk_starts, p_counter, scale_log2, S, HQ: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes one tile after another."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = p_o.dtype.element_ty
    q_tile = gl.allocate_shared_memory(dtype, [2 * QUERIES, ROWS, D], SHARED)
    ring = gl.allocate_shared_memory(dtype, [STAGES, UNIT, D], SHARED)
    info = gl.allocate_shared_memory(gl.int32, [QUERIES, NUM_INFO], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    mbarrier.init(cleared, count=1)
    fence_async_shared()
    # The first warpgroup issues first.
    mbarrier.arrive(turns.index(0), count=1)
    shared = (q_tile, ring, info, full, empty, q_full, q_empty, turns, cleared)
    batch = (p_chunks, p_cu_seqlens, gl.load(p_chunk_starts + S))
    gl.warp_specialize(
        [
            (_compute, (p_o, scale_log2, shared, 0, HQ)),
            (_compute, (p_o, scale_log2, shared, 1, HQ)),
            (_stream, ((q_desc, k_desc, v_desc), batch, shared, p_counter, G, HQ // 2)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )
