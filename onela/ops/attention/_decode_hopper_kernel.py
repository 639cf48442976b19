"""The same step for Hopper (Triton Gluon), by warps that have their own jobs.

A program stays on its multiprocessor and takes one tile after another: 128 rows (beam, head of the group) of
one request and key head, over one split of its prompt. Two warpgroups compute, 64 rows each, each at its own
pace, so that one's softmax runs beside the other's products. A third one brings in what they need, ahead of
them and across the border between two tiles, through one ring of equal stages in shared memory: one of its
warps streams the prompt's pages (copy engine), two gather rows (cp.async) and write the records.

Units of a tile, in order: first 64 keys of the prompt that may be incomplete, then whole ones, by the copy
engine from their pages; then the beams' own keys, gathered row by row. Of an own stage each
warpgroup has 32 keys, those of its own beams: for each depth the ancestors of its beams, then their new keys.
Stages come in the order in which they are needed: K_0, K_1, V_0, K_2, V_1, ..., V_last.

Scores of a unit are computed while the weighted values of the unit before are still being summed:

    issue S_i = Q K_i^T;  O *= alpha_(i-1);  issue O += P_(i-1) V_(i-1);  wait S_i;  softmax to P_i, alpha_i;
    wait O
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

# Rows of a warpgroup, keys of a unit of the prompt, keys of a warpgroup's own unit.
ROWS = gl.constexpr(64)
UNIT = gl.constexpr(64)
OWN_UNIT = gl.constexpr(32)
# What the gathering warps tell a computing warpgroup about a tile.
N_PROMPT, N_OWN, FIRST_OWN, LIMIT, START, ROW0, WIDTH, NUM_INFO = (gl.constexpr(i) for i in range(8))


@gluon.constexpr_function
def _power_of_two(n):
    return triton.next_power_of_2(n)


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
def _add(a, b):
    return a + b


@gluon.jit
def _turn(place, STAGES: gl.constexpr):
    """The stage of a place in the sequence of all, and the parity of the times that it has been filled before."""
    return place % STAGES, (place // STAGES) & 1


@gluon.jit
def _tiles(p_cu_rows, B, G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_B: gl.constexpr):
    """Tiles up to the end of each request."""
    LIST: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [gl.num_warps()], [0])
    o_b = gl.arange(0, BLOCK_B, layout=LIST)
    low = gl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    high = gl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    tiles = ((high - low) * G + BLOCK_M - 1) // BLOCK_M
    return o_b, tiles, gl.associative_scan(tiles, 0, _add)


@gluon.jit
def _tile(
    item, num_tiles, batch, HKV: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_B: gl.constexpr,
):  # fmt: skip
    """Where an item's rows stand, and which units of its prompt and of the beams' own keys are its split's."""
    p_page_table, p_prompt_lens, p_cu_rows, p_prompts, p_depths, stride_table, B = batch
    o_b, tiles, ends = _tiles(p_cu_rows, B, G, 2 * ROWS, BLOCK_B)
    tile = item % gl.maximum(num_tiles, 1)
    i_h = (item // gl.maximum(num_tiles, 1)) % HKV
    i_s = item // gl.maximum(num_tiles * HKV, 1)
    r = gl.minimum(gl.sum((ends <= tile).to(gl.int32), 0), B - 1)
    start = (tile - gl.sum(gl.where(o_b == r, ends - tiles, 0), 0)) * (2 * ROWS)
    row0 = gl.load(p_cu_rows + r)
    width = gl.load(p_cu_rows + r + 1) - row0
    prompt = gl.load(p_prompts + r).to(gl.int64)
    depth = gl.load(p_depths + r)
    served = prompt >= 0
    length = gl.load(p_prompt_lens + prompt, mask=served, other=0)
    # An own unit counts as half of a unit of the prompt.
    has_tail = (length % UNIT > 0).to(gl.int32)
    in_prompt = length // UNIT + has_tail
    halves = 2 * in_prompt + ((depth + 1) * OWN + OWN_UNIT - 1) // OWN_UNIT
    low = halves * i_s // SPLITS
    high = halves * (i_s + 1) // SPLITS
    first = gl.minimum((low + 1) // 2, in_prompt)
    num_prompt = gl.minimum((high + 1) // 2, in_prompt) - first
    first_own = gl.maximum(low - 2 * in_prompt, 0)
    num_own = gl.maximum(high - 2 * in_prompt, 0) - first_own
    # The first unit is the incomplete one, or all unseen where there is nothing else.
    limit = gl.where(num_prompt == 0, 0, gl.where(first < has_tail, length % UNIT, UNIT))
    num_prompt = gl.maximum(num_prompt, 1)
    rows = (start, row0, width, gl.where(served, width, 0), depth, i_h, i_s)
    pages = (p_page_table + prompt * stride_table, first, has_tail, length // UNIT, limit)
    return rows, pages, num_prompt, num_own, first_own


@gluon.jit
def _place(unit, pages, PAGE: gl.constexpr):
    """The first token of a unit within the cache. The prompt's incomplete unit stands before its first whole one."""
    p_table, first, has_tail, whole, limit = pages
    PER_PAGE: gl.constexpr = PAGE // UNIT
    index = first + unit
    index = gl.where(index < has_tail, whole, index - has_tail)
    seen = (unit > 0) | (limit > 0)
    page = gl.load(p_table + index // PER_PAGE, mask=seen, other=0)
    return gl.where(seen, page * PAGE + (index % PER_PAGE) * UNIT, 0)


@gluon.jit
def _copy(desc, token, column, ring, full, empty, place):
    """A unit of the prompt into its stage, as it stands in its page."""
    D: gl.constexpr = ring.shape[2]
    stage, parity = _turn(place, ring.shape[0])
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.expect(full.index(stage), UNIT * D * 2)
    tma.async_copy_global_to_shared(desc, [token, column], full.index(stage), ring.index(stage))


@gluon.jit
def _grant(granted, empty, place, STAGES: gl.constexpr):
    """Let the gathering warps fill a stage. All stages are waited for here, in order: a parity tells only the last two
    times apart."""
    stage, parity = _turn(place, STAGES)
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.arrive(granted.index(stage), count=1)


@gluon.jit
def _wait_for(granted, stage, grants):
    """Wait until a stage may be filled; a bit for each stage counts how often that has been."""
    mbarrier.wait(granted.index(stage), (grants >> stage) & 1)
    return grants ^ (1 << stage)


@gluon.jit
def _stream(
    streams, batch, num_tiles, shared, HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr,
    OWN: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The warp that brings in the prompts' units, but for the values of an incomplete one."""
    k_desc, v_desc = streams
    _q_tile, ring, _own_list, _info, full, empty, granted, _q_full, _q_empty = shared
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    place = 0
    for item in range(gl.program_id(0), num_tiles * HKV * SPLITS, gl.num_programs(0)):
        rows, pages, num_prompt, num_own, _first_own = _tile(
            item, num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
        )
        column = rows[5] * D
        whole = pages[4] == UNIT
        token = _place(0, pages, PAGE)
        _copy(k_desc, token, column, ring, full, empty, place)
        for u in range(1, num_prompt):
            after = _place(u, pages, PAGE)
            _copy(k_desc, after, column, ring, full, empty, place + 2 * u - 1)
            if (u > 1) | whole:
                _copy(v_desc, token, column, ring, full, empty, place + 2 * u)
            else:
                _grant(granted, empty, place + 2 * u, STAGES)
            token = after
        place += 2 * num_prompt - 1
        if num_own > 0:
            _grant(granted, empty, place, STAGES)
            place += 1
        if (num_prompt > 1) | whole:
            _copy(v_desc, token, column, ring, full, empty, place)
        else:
            _grant(granted, empty, place, STAGES)
        place += 1
        for _ in range(2 * num_own - 1):
            _grant(granted, empty, place, STAGES)
            place += 1


@gluon.jit
def _arrived(bar):
    """Let what cp.async has been asked for arrive, be seen by the tensor cores, and be known."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _will_arrive(bar):
    """The same without waiting; who uses it has to make it visible to the tensor cores."""
    async_copy.mbarrier_arrive(bar, increment_count=True)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _gather_prompt(
    buffer, p_cache, token, limit, i_h, HKV: gl.constexpr, CP: gl.constexpr, PART: gl.constexpr
):
    """The incomplete unit of a prompt; behind its end may stand anything, NaN too, and zeros are read."""
    D: gl.constexpr = buffer.shape[1]
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    for part in gl.static_range(UNIT // PART):
        o_n = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, CP))
        at = p_cache + ((token + o_n).to(gl.int64) * HKV + i_h) * D
        mask = (o_n < limit)[:, None] & (o_d < D)[None, :]
        async_copy.async_copy_global_to_shared(
            buffer.slice(part * PART, PART), at[:, None] + o_d[None, :], mask=mask
        )


@gluon.jit
def _gather_own(
    own, sources, p_new, stride_new, p_records, i_h, HKV: gl.constexpr, CP: gl.constexpr, PART: gl.constexpr
):
    """A warpgroup's own unit: each row from where its list says, zeros where there is none."""
    D: gl.constexpr = own.shape[1]
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    for part in gl.static_range(OWN_UNIT // PART):
        source = sources.slice(part * PART, PART).load(gl.SliceLayout(1, CP)).to(gl.int64)
        new = p_new + (-2 - source) * stride_new + i_h * D
        at = gl.where(source < 0, new, p_records + (source * HKV + i_h) * D)
        mask = (source != -1)[:, None] & (o_d < D)[None, :]
        async_copy.async_copy_global_to_shared(
            own.slice(part * PART, PART), at[:, None] + o_d[None, :], mask=mask
        )


@gluon.jit
def _write_records(
    p_k, p_v, stride_k, stride_v, p_records_k, p_records_v, p_slots, start, row0, width_served, i_h,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, CP: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """New keys and values of the beams whose rows begin in this tile, to their slots."""
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    begun = (start + G - 1) // G
    for part in range(0, (start + 2 * ROWS + G - 1) // G - begun, PART):
        beam = begun + part + gl.arange(0, PART, layout=gl.SliceLayout(1, CP))
        mine = (beam < width_served) & (beam * G < start + 2 * ROWS)
        row = (row0 + beam).to(gl.int64)
        record = gl.load(p_slots + row, mask=mine, other=-1).to(gl.int64)
        mask = (record >= 0)[:, None] & (o_d < D)[None, :]
        new_k = gl.load(p_k + (row * stride_k + i_h * D)[:, None] + o_d[None, :], mask=mask)
        new_v = gl.load(p_v + (row * stride_v + i_h * D)[:, None] + o_d[None, :], mask=mask)
        at = ((record * HKV + i_h) * D)[:, None] + o_d[None, :]
        gl.store(p_records_k + at, new_k, mask=mask)
        gl.store(p_records_v + at, new_v, mask=mask)


@gluon.jit
def _gather(
    gathers, batch, num_tiles, shared, HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr,
    OWN: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The warps that gather rows: queries, values of incomplete units, own keys; they write the records too."""
    (
        p_q, q_desc, p_k, p_v, p_v_cache, p_records_k, p_records_v, p_slots, p_ancestors, stride_q, stride_k, stride_v,
        stride_ancestors,
    ) = gathers  # fmt: skip
    q_tile, ring, own_list, info, full, _empty, granted, q_full, q_empty = shared
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    NW: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = min(32, D // 8)
    PART: gl.constexpr = 4 * NW * 32 // LANES
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    o_p = gl.arange(0, PART, layout=gl.SliceLayout(1, CP))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    in_d = (o_d < D)[None, :]
    o_l = gl.arange(0, OWN_UNIT, layout=LIST)
    place = 0
    parity = 1
    grants = 0
    item = gl.program_id(0)
    rows, pages, num_prompt, num_own, first_own = _tile(item, num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B)
    for item in range(gl.program_id(0), num_tiles * HKV * SPLITS, gl.num_programs(0)):
        start, row0, width, width_served, depth, i_h, i_s = rows
        units = num_prompt + num_own
        for group in gl.static_range(2):
            # The warpgroup is through with the queries of the tile before.
            mbarrier.wait(q_empty.index(group), parity)
            info.index(group * NUM_INFO + N_PROMPT).store(gl.full([1], 0, gl.int32, ONE) + num_prompt)
            info.index(group * NUM_INFO + N_OWN).store(gl.full([1], 0, gl.int32, ONE) + num_own)
            info.index(group * NUM_INFO + FIRST_OWN).store(gl.full([1], 0, gl.int32, ONE) + first_own)
            info.index(group * NUM_INFO + LIMIT).store(gl.full([1], 0, gl.int32, ONE) + pages[4])
            info.index(group * NUM_INFO + START).store(gl.full([1], 0, gl.int32, ONE) + start)
            info.index(group * NUM_INFO + ROW0).store(gl.full([1], 0, gl.int32, ONE) + row0)
            info.index(group * NUM_INFO + WIDTH).store(gl.full([1], 0, gl.int32, ONE) + width)
            if ROWS % G == 0:
                # Beams stand one after the other; those past the request's last are another's, or nobody's.
                gl.thread_barrier()
                mbarrier.expect(q_full.index(group), ROWS * D * 2)
                tma.async_copy_global_to_shared(
                    q_desc, [row0 + (start + group * ROWS) // G, i_h * G, 0], q_full.index(group),
                    q_tile.index(group)._reinterpret(ring.dtype, [ROWS // G, G, D], q_desc.layout),
                )  # fmt: skip
            else:
                for part in gl.static_range(ROWS // PART):
                    m = start + group * ROWS + part * PART + o_p
                    at = p_q + (row0 + m // G).to(gl.int64) * stride_q + (i_h * G + m % G) * D
                    async_copy.async_copy_global_to_shared(
                        q_tile.index(group).slice(part * PART, PART), at[:, None] + o_d[None, :],
                        mask=(m // G < width_served)[:, None] & in_d,
                    )  # fmt: skip
                _arrived(q_full.index(group))
        parity ^= 1
        if pages[4] < UNIT:
            stage, _ = _turn(place + gl.where(units == 1, 1, 2), STAGES)
            token = _place(0, pages, PAGE)
            grants = _wait_for(granted, stage, grants)
            _gather_prompt(ring.index(stage), p_v_cache, token, pages[4], i_h, HKV, CP, PART)
            _arrived(full.index(stage))
        if i_s == SPLITS - 1:
            _write_records(
                p_k, p_v, stride_k, stride_v, p_records_k, p_records_v, p_slots, start, row0, width_served, i_h,
                HKV, G, D, CP, PART,
            )  # fmt: skip
        # The next tile is looked up before this one's last copies are waited for.
        after = gl.minimum(item + gl.num_programs(0), num_tiles * HKV * SPLITS - 1)
        rows, pages, next_prompt, next_own, next_first = _tile(
            after, num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
        )
        for o in range(num_own):
            u = num_prompt + o
            stage, _ = _turn(place + 2 * u - 1, STAGES)
            grants = _wait_for(granted, stage, grants)
            own = ring.index(stage)._reinterpret(ring.dtype, [2, OWN_UNIT, D], ring.layout)
            for group in gl.static_range(2):
                # Where each key lies: -1 nowhere, a record, or (below -1) the row of a new key.
                e = (first_own + o) * OWN_UNIT + o_l
                j = e // OWN
                beam = (start + group * ROWS) // G + e % OWN
                inside = (j <= depth) & (beam < width_served)
                row = (row0 + beam).to(gl.int64)
                slot = gl.load(p_slots + row, mask=inside, other=-1)
                source = gl.load(
                    p_ancestors + row * stride_ancestors + j, mask=inside & (j < depth), other=-1
                )
                source = gl.where(j == depth, -2 - row.to(gl.int32), source)
                own_list.index(2 * stage + group).store(gl.where(slot >= 0, source, -1))
            gl.thread_barrier()
            for group in gl.static_range(2):
                _gather_own(
                    own.index(group),
                    own_list.index(2 * stage + group),
                    p_k,
                    stride_k,
                    p_records_k,
                    i_h,
                    HKV,
                    CP,
                    PART,
                )
            _will_arrive(full.index(stage))
            v_stage, _ = _turn(place + gl.where(u == units - 1, 2 * u + 1, 2 * u + 2), STAGES)
            grants = _wait_for(granted, v_stage, grants)
            own = ring.index(v_stage)._reinterpret(ring.dtype, [2, OWN_UNIT, D], ring.layout)
            for group in gl.static_range(2):
                _gather_own(
                    own.index(group),
                    own_list.index(2 * stage + group),
                    p_v,
                    stride_v,
                    p_records_v,
                    i_h,
                    HKV,
                    CP,
                    PART,
                )
            _will_arrive(full.index(v_stage))
        place += 2 * units
        num_prompt = next_prompt
        num_own = next_own
        first_own = next_first


@gluon.jit
def _softmax(s, peak, total, scale_log2):
    """One unit of the online softmax: weights, new peak and sum, and the factor on what was summed before."""
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    return p, new_peak, total * alpha + gl.sum(p, 1), alpha


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
    return gl.where((sources != -1)[None, :] & mine, s, -float("inf"))


@gluon.jit
def _compute(
    results, shared, GROUP: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr,
    SPLITS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One of the two computing warpgroups: 64 rows of every tile."""
    p_o, p_part_lse, p_slots, scale_log2, N, num_tiles = results
    q_tile, ring, own_list, info, full, empty, _granted, q_full, q_empty = shared
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
    place = 0
    parity = 0
    for item in range(gl.program_id(0), num_tiles * HKV * SPLITS, gl.num_programs(0)):
        mbarrier.wait(q_full.index(GROUP), parity)
        parity ^= 1
        num_prompt = gl.max(info.index(GROUP * NUM_INFO + N_PROMPT).load(ONE), 0)
        num_own = gl.max(info.index(GROUP * NUM_INFO + N_OWN).load(ONE), 0)
        own_key = gl.max(info.index(GROUP * NUM_INFO + FIRST_OWN).load(ONE), 0) * OWN_UNIT
        limit = gl.max(info.index(GROUP * NUM_INFO + LIMIT).load(ONE), 0)
        start = gl.max(info.index(GROUP * NUM_INFO + START).load(ONE), 0) + GROUP * ROWS
        row0 = gl.max(info.index(GROUP * NUM_INFO + ROW0).load(ONE), 0)
        width = gl.max(info.index(GROUP * NUM_INFO + WIDTH).load(ONE), 0)
        beam = (start + o_m) // G
        slot = gl.load(p_slots + row0 + beam, mask=beam < width, other=-1)
        i_h = (item // num_tiles) % HKV
        i_s = item // (num_tiles * HKV)

        acc = gl.zeros([ROWS, D], gl.float32, MMA_O)
        peak = gl.full([ROWS], -1.0e30, gl.float32, ROWS_S)
        total = gl.zeros([ROWS], gl.float32, ROWS_S)
        stage, turn = _turn(place, STAGES)
        mbarrier.wait(full.index(stage), turn)
        held = 0
        if HELD > 0:
            held = queries.slice(0, HELD, dim=1).load(
                gl.DotOperandLayout(operand_index=0, parent=MMA_S, k_width=2)
            )
        s = _scores(held, queries, ring.index(stage), no_scores, HELD)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage), count=1)
        o_n = gl.arange(0, UNIT, layout=gl.SliceLayout(0, MMA_S))
        s = gl.where((o_n < limit)[None, :], s, -float("inf"))
        p, peak, total, alpha = _softmax(s, peak, total, scale_log2)
        p = gl.convert_layout(p.to(dtype), OPERAND)
        place += 1
        stage, turn = _turn(place, STAGES)
        mbarrier.wait(full.index(stage), turn)
        for _ in range(1, num_prompt):
            # The keys of unit i are there.
            s = _scores(held, queries, ring.index(stage), no_scores, HELD)
            k_stage = stage
            v_stage, turn = _turn(place + 1, STAGES)
            # The waits for copies end basic blocks: what stands between them stays between them.
            mbarrier.wait(full.index(v_stage), turn)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, ring.index(v_stage), acc, is_async=True)
            place += 2
            stage, turn = _turn(place, STAGES)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(empty.index(k_stage), count=1)
            weights, peak, total, alpha = _softmax(s, peak, total, scale_log2)
            weights = gl.convert_layout(weights.to(dtype), OPERAND)
            weights, total = warpgroup_mma_wait(1, deps=[weights, total])
            # What comes next: the next unit's keys, or the last one's values.
            mbarrier.wait(full.index(stage), turn)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(empty.index(v_stage), count=1)
            p = weights
        # What stands next is waited for: the first own keys, or the last values.
        if num_own > 0:
            fence_async_shared()
            own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
            s_own = warpgroup_mma(queries, own.permute((1, 0)), no_own, use_acc=False, is_async=True)
            sources = own_list.index(2 * stage + GROUP).load(gl.SliceLayout(0, MMA_OWN))
            v_stage, turn = _turn(place + 1, STAGES)
            mbarrier.wait(full.index(v_stage), turn)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, ring.index(v_stage), acc, is_async=True)
            s_own = warpgroup_mma_wait(1, deps=[s_own])
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(q_empty.index(GROUP), count=1, pred=num_own == 1)
            own_m = gl.arange(0, ROWS, layout=ROWS_OWN)
            own_peak = gl.convert_layout(peak, ROWS_OWN)
            own_total = gl.convert_layout(total, ROWS_OWN)
            s_own = _see(s_own, sources, own_key, own_m, start, G, OWN, MMA_OWN)
            p_own, own_peak, own_total, own_alpha = _softmax(s_own, own_peak, own_total, scale_log2)
            p_own = gl.convert_layout(p_own.to(dtype), OPERAND)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(empty.index(v_stage), count=1)
            place += 2
            for i in range(1, num_own):
                stage, turn = _turn(place, STAGES)
                mbarrier.wait(full.index(stage), turn)
                fence_async_shared()
                own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
                s_own = warpgroup_mma(queries, own.permute((1, 0)), no_own, use_acc=False, is_async=True)
                sources = own_list.index(2 * stage + GROUP).load(gl.SliceLayout(0, MMA_OWN))
                v_stage, turn = _turn(place + 1, STAGES)
                mbarrier.wait(full.index(v_stage), turn)
                fence_async_shared()
                acc = acc * gl.convert_layout(own_alpha, ROWS_O)[:, None]
                own = ring.index(v_stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
                acc = warpgroup_mma(p_own, own, acc, is_async=True)
                s_own = warpgroup_mma_wait(1, deps=[s_own])
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.arrive(q_empty.index(GROUP), count=1, pred=i == num_own - 1)
                s_own = _see(s_own, sources, own_key + i * OWN_UNIT, own_m, start, G, OWN, MMA_OWN)
                weights, own_peak, own_total, own_alpha = _softmax(s_own, own_peak, own_total, scale_log2)
                acc, p_own = warpgroup_mma_wait(0, deps=[acc, p_own])
                mbarrier.arrive(empty.index(v_stage), count=1)
                place += 2
                p_own = gl.convert_layout(weights.to(dtype), OPERAND)
            stage, turn = _turn(place, STAGES)
            mbarrier.wait(full.index(stage), turn)
            fence_async_shared()
            acc = acc * gl.convert_layout(own_alpha, ROWS_O)[:, None]
            own = ring.index(stage)._reinterpret(dtype, [2, OWN_UNIT, D], SHARED).index(GROUP)
            acc = warpgroup_mma(p_own, own, acc, is_async=True)
            acc, p_own = warpgroup_mma_wait(0, deps=[acc, p_own])
            peak = gl.convert_layout(own_peak, ROWS_S)
            total = gl.convert_layout(own_total, ROWS_S)
        else:
            mbarrier.arrive(q_empty.index(GROUP), count=1)
            acc = acc * gl.convert_layout(alpha, ROWS_O)[:, None]
            acc = warpgroup_mma(p, ring.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(stage), count=1)
        place += 1

        live = slot >= 0
        total = gl.where(live, total, 0.0)
        factor = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
        # A padding row may have met anything, NaN too.
        acc = gl.where(
            gl.convert_layout(live, ROWS_O)[:, None], acc * gl.convert_layout(factor, ROWS_O)[:, None], 0.0
        )
        if SPLITS > 1:
            m = start + o_m
            out = i_s.to(gl.int64) * N * HQ + (row0 + m // G).to(gl.int64) * HQ + i_h * G + m % G
            lse = gl.where(total > 0.0, peak + gl.log2(gl.where(total > 0.0, total, 1.0)), -float("inf"))
            in_rows = m // G < width
            gl.store(p_part_lse + out, lse, mask=in_rows)
            out = gl.convert_layout(out, ROWS_O)
            o_c = gl.arange(0, D, layout=gl.SliceLayout(0, MMA_O))
            mask = gl.convert_layout(in_rows, ROWS_O)[:, None] & (o_c < D)[None, :]
            gl.store(p_o + out[:, None] * D + o_c[None, :], acc, mask=mask)
        else:
            # Four lanes of a row swap what they hold, so that each stores 16 bytes.
            # One bit at a time, since that is done by shuffles, without shared memory; the move keeps the two apart.
            HALFWAY: gl.constexpr = _rows_layout(D, 8, 4)
            OUT: gl.constexpr = _rows_layout(D, 8, 16)
            result = gl.convert_layout(acc.to(dtype), HALFWAY)
            result = gl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=True, pack=2
            )
            result = gl.convert_layout(result, OUT)
            m = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
            out = (row0 + m // G).to(gl.int64) * HQ + i_h * G + m % G
            o_c = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
            mask = (m // G < width)[:, None] & (o_c < D)[None, :]
            gl.store(p_o + out[:, None] * D + o_c[None, :], result, mask=mask)


@gluon.jit
def beam_attention_hopper_kernel(
    p_q, q_desc, p_k, p_v, k_desc, v_desc, p_v_cache, p_page_table, p_prompt_lens, p_records_k, p_records_v, p_slots,
    p_ancestors, p_cu_rows, p_prompts, p_depths, p_o, p_part_lse, stride_q, stride_k, stride_v, stride_table,
    stride_ancestors, scale_log2, N, B, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, OWN: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_B: gl.constexpr, HELD: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes every so-many-th tile, head and split."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = p_q.dtype.element_ty
    HQ: gl.constexpr = HKV * G
    _o_b, tiles, _ends = _tiles(p_cu_rows, B, G, 2 * ROWS, BLOCK_B)
    num_tiles = gl.sum(tiles, 0)
    if SPLITS == 1:
        # Rows past the last request give zeros.
        OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
        first = gl.load(p_cu_rows + B)
        for n in range(first + gl.program_id(0), N, gl.num_programs(0)):
            for h in range(0, HQ, 4):
                o_h = h + gl.arange(0, 4, layout=gl.SliceLayout(1, OUT))
                o_d = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
                row = n.to(gl.int64)  # type: ignore[attr-defined]
                at = p_o + (row * HQ + o_h)[:, None] * D + o_d[None, :]
                gl.store(at, gl.zeros([4, D], dtype, OUT), mask=(o_h < HQ)[:, None] & (o_d < D)[None, :])

    q_tile = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
    ring = gl.allocate_shared_memory(dtype, [STAGES, UNIT, D], SHARED)
    own_list = gl.allocate_shared_memory(gl.int32, [2 * STAGES, OWN_UNIT], PLAIN)
    info = gl.allocate_shared_memory(gl.int32, [2 * NUM_INFO, 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    granted = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(granted.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    fence_async_shared()
    shared = (q_tile, ring, own_list, info, full, empty, granted, q_full, q_empty)
    batch = (p_page_table, p_prompt_lens, p_cu_rows, p_prompts, p_depths, stride_table, B)
    gathers = (
        p_q, q_desc, p_k, p_v, p_v_cache, p_records_k, p_records_v, p_slots, p_ancestors, stride_q, stride_k, stride_v,
        stride_ancestors,
    )  # fmt: skip
    results = (p_o, p_part_lse, p_slots, scale_log2, N, num_tiles)
    gl.warp_specialize(
        [
            (_compute, (results, shared, 0, HKV, G, OWN, SPLITS, HELD)),
            (_compute, (results, shared, 1, HKV, G, OWN, SPLITS, HELD)),
            (_gather, (gathers, batch, num_tiles, shared, HKV, G, PAGE, OWN, SPLITS, BLOCK_B)),
            (_stream, ((k_desc, v_desc), batch, num_tiles, shared, HKV, G, PAGE, OWN, SPLITS, BLOCK_B)),
        ],
        [4, 2, 1],
        [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
