"""The warps of the Hopper attention kernel that bring in what the others compute with, and write the records."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from onela.ops.attention._decode_hopper_tiles import (
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
    tile_at,
)


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
    stage, parity = stage_at(place, ring.shape[0])
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.expect(full.index(stage), UNIT * D * 2)
    tma.async_copy_global_to_shared(desc, [token, column], full.index(stage), ring.index(stage))


@gluon.jit
def _grant(granted, empty, place, STAGES: gl.constexpr):
    """Let the gathering warps fill a stage. All stages are waited for here, in order: a parity tells only the last two
    times apart."""
    stage, parity = stage_at(place, STAGES)
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.arrive(granted.index(stage), count=1)


@gluon.jit
def _wait_for(granted, stage, grants):
    """Wait until a stage may be filled; a bit for each stage counts how often that has been."""
    mbarrier.wait(granted.index(stage), (grants >> stage) & 1)
    return grants ^ (1 << stage)


@gluon.jit
def stream_units(
    streams, batch, shared, HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr,
    OWN: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The warp that brings in the prompts' units, but for the values of an incomplete one.

    It does not wait for the kernel before, which has written nothing of a prompt.
    """
    k_desc, v_desc = streams
    _q_tile, ring, _own_list, _lists, _info, full, empty, granted, _q_full, _q_empty = shared
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    num_tiles, items = count_items(batch, HKV, G, SPLITS, BLOCK_B)
    place = 0
    rows, pages, num_prompt, num_own, _first_own = tile_at(
        gl.program_id(0), num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
    )
    token = _place(0, pages, PAGE)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        column = rows[5] * D
        whole = pages[4] == UNIT
        next_rows = rows
        next_pages = pages
        next_prompt = num_prompt
        next_own = num_own
        next_token = token
        _copy(k_desc, token, column, ring, full, empty, place)
        for u in range(1, num_prompt + 1):
            after = token
            if u < num_prompt:
                after = _place(u, pages, PAGE)
                _copy(k_desc, after, column, ring, full, empty, place + 2 * u - 1)
            elif num_own > 0:
                _grant(granted, empty, place + 2 * u - 1, STAGES)
            v_place = place + 2 * u - ((u == num_prompt) & (num_own == 0)).to(gl.int32)
            if (u > 1) | whole:
                _copy(v_desc, token, column, ring, full, empty, v_place)
            else:
                _grant(granted, empty, v_place, STAGES)
            token = after
            if (u == 1) & (item + gl.num_programs(0) < items):
                # The next tile is looked up while the ring is full.
                next_rows, next_pages, next_prompt, next_own, _first_own = tile_at(
                    item + gl.num_programs(0), num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
                )
                next_token = _place(0, next_pages, PAGE)
        place += 2 * num_prompt + (num_own > 0).to(gl.int32)
        for _ in range(2 * num_own - 1):
            _grant(granted, empty, place, STAGES)
            place += 1
        rows = next_rows
        pages = next_pages
        num_prompt = next_prompt
        num_own = next_own
        token = next_token


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
def _own_keys(
    o_l, unit, sources, tile, OWN: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr
):
    """Addresses of an own unit's keys and values, the two warpgroups' one after the other; 0 where there is none."""
    p_k, p_v, p_records_k, p_records_v, p_slots, p_ancestors, stride_k, stride_v, stride_ancestors = sources
    start, row0, width_served, depth, i_h = tile
    e = unit * OWN_UNIT + o_l % OWN_UNIT
    j = e // OWN
    beam = (start + (o_l // OWN_UNIT) * ROWS) // G + e % OWN
    inside = (j <= depth) & (beam < width_served)
    row = (row0 + beam).to(gl.int64)
    slot = gl.load(p_slots + row, mask=inside, other=-1)
    source = gl.load(p_ancestors + row * stride_ancestors + j, mask=inside & (j < depth), other=-1)
    record = (source.to(gl.int64) * HKV + i_h) * D
    k_at = gl.where(j == depth, p_k + (row * stride_k + i_h * D), p_records_k + record).to(
        gl.int64, bitcast=True
    )
    v_at = gl.where(j == depth, p_v + (row * stride_v + i_h * D), p_records_v + record).to(
        gl.int64, bitcast=True
    )
    there = (slot >= 0) & ((j == depth) | (source >= 0))
    return gl.where(there, k_at, 0), gl.where(there, v_at, 0)


@gluon.jit
def _gather_own(own, addresses, CP: gl.constexpr):
    """An own unit: each row from its address, zeros where there is none."""
    D: gl.constexpr = own.shape[2]
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    for group in gl.static_range(2):
        address = addresses.slice(group * OWN_UNIT, OWN_UNIT).load(gl.SliceLayout(1, CP))
        row = gl.multiple_of(address.to(gl.pointer_type(own.dtype), bitcast=True), 16)
        mask = (address != 0)[:, None] & (o_d < D)[None, :]
        async_copy.async_copy_global_to_shared(own.index(group), row[:, None] + o_d[None, :], mask=mask)


@gluon.jit
def gather_rows(
    gathers, batch, shared, HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr,
    OWN: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The warps that gather rows: queries, values of incomplete units, own keys; they describe each tile too."""
    (
        p_q, q_desc, p_k, p_v, p_v_cache, p_records_k, p_records_v, p_slots, p_ancestors, stride_q, stride_k, stride_v,
        stride_ancestors,
    ) = gathers  # fmt: skip
    q_tile, ring, own_list, lists, info, full, _empty, granted, q_full, q_empty = shared
    sources = (p_k, p_v, p_records_k, p_records_v, p_slots, p_ancestors, stride_k, stride_v, stride_ancestors)
    k_list = lists.index(0)
    v_list = lists.index(1)
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    NW: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = min(32, D // 8)
    PART: gl.constexpr = 4 * NW * 32 // LANES
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    CP_OWN: gl.constexpr = gl.BlockedLayout([4, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    o_p = gl.arange(0, PART, layout=gl.SliceLayout(1, CP))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    in_d = (o_d < D)[None, :]
    o_l = gl.arange(0, 2 * OWN_UNIT, layout=LIST)
    place = 0
    parity = 1
    grants = 0
    num_tiles, items = count_items(batch, HKV, G, SPLITS, BLOCK_B)
    rows, pages, num_prompt, num_own, first_own = tile_at(
        gl.program_id(0), num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
    )
    o_i = gl.arange(0, NUM_INFO, layout=ONE)
    gdc_wait()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start, row0, width, width_served, depth, i_h, _i_s = rows
        units = num_prompt + num_own
        # Two tiles take turns, so that this is written before the tile before has ended.
        told = gl.where(o_i == N_PROMPT, num_prompt, gl.where(o_i == N_OWN, num_own, first_own))
        told = gl.where(o_i == LIMIT, pages[4], gl.where(o_i == START, start, told))
        info.index(parity).store(gl.where(o_i == ROW0, row0, gl.where(o_i == WIDTH, width, told)))
        gl.thread_barrier()
        for group in gl.static_range(2):
            # The warpgroup is through with the queries of the tile before.
            mbarrier.wait(q_empty.index(group), parity)
            if ROWS % G == 0:
                # Beams stand one after the other; those past the request's last are another's, or nobody's.
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
            stage, _ = stage_at(place + gl.where(units == 1, 1, 2), STAGES)
            token = _place(0, pages, PAGE)
            grants = _wait_for(granted, stage, grants)
            _gather_prompt(ring.index(stage), p_v_cache, token, pages[4], i_h, HKV, CP, PART)
            _arrived(full.index(stage))
        tile = (start, row0, width_served, depth, i_h)
        k_at, v_at = _own_keys(o_l, first_own, sources, tile, OWN, HKV, G, D)
        # The next tile is looked up before this one's last copies are waited for.
        after = gl.minimum(item + gl.num_programs(0), items - 1)
        rows, pages, next_prompt, next_own, next_first = tile_at(
            after, num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
        )
        for o in range(num_own):
            u = num_prompt + o
            stage, _ = stage_at(place + 2 * u - 1, STAGES)
            # Where the next unit's keys lie is looked up while the ring is waited for.
            next_k_at, next_v_at = _own_keys(o_l, first_own + o + 1, sources, tile, OWN, HKV, G, D)
            grants = _wait_for(granted, stage, grants)
            own_list.index(stage).store(gl.where(k_at == 0, 0, 1))
            k_list.store(k_at)
            v_list.store(v_at)
            gl.thread_barrier()
            _gather_own(
                ring.index(stage)._reinterpret(ring.dtype, [2, OWN_UNIT, D], ring.layout), k_list, CP_OWN
            )
            _will_arrive(full.index(stage))
            v_stage, _ = stage_at(place + gl.where(u == units - 1, 2 * u + 1, 2 * u + 2), STAGES)
            grants = _wait_for(granted, v_stage, grants)
            _gather_own(
                ring.index(v_stage)._reinterpret(ring.dtype, [2, OWN_UNIT, D], ring.layout), v_list, CP_OWN
            )
            _will_arrive(full.index(v_stage))
            k_at = next_k_at
            v_at = next_v_at
        place += 2 * units
        num_prompt = next_prompt
        num_own = next_own
        first_own = next_first


@gluon.jit
def write_records(
    records, batch, shared, p_o, N, HKV: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_B: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """The warp that writes new keys and values to their slots, and zeros for rows past the last request."""
    p_k, p_v, p_records_k, p_records_v, p_slots, stride_k, stride_v = records
    D: gl.constexpr = shared[1].shape[2]
    LANES: gl.constexpr = min(32, D // 8)
    PART: gl.constexpr = 4 * 32 // LANES
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    o_p = gl.arange(0, PART, layout=gl.SliceLayout(1, CP))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, CP))
    in_d = (o_d < D)[None, :]
    num_tiles, items = count_items(batch, HKV, G, SPLITS, BLOCK_B)
    gdc_wait()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        rows, _pages, _num_prompt, _num_own, _first_own = tile_at(
            item, num_tiles, batch, HKV, G, OWN, SPLITS, BLOCK_B
        )
        start, row0, _width, width_served, _depth, i_h, i_s = rows
        # Beams whose rows begin in this tile; the splits take turns.
        begun = (start + G - 1) // G
        for part in range(i_s * PART, (start + 2 * ROWS + G - 1) // G - begun, SPLITS * PART):
            beam = begun + part + o_p
            mine = (beam < width_served) & (beam * G < start + 2 * ROWS)
            row = (row0 + beam).to(gl.int64)
            record = gl.load(p_slots + row, mask=mine, other=-1).to(gl.int64)
            mask = (record >= 0)[:, None] & in_d
            new_k = gl.load(
                p_k + (row * stride_k + i_h * D)[:, None] + o_d[None, :], mask=mine[:, None] & in_d
            )
            new_v = gl.load(
                p_v + (row * stride_v + i_h * D)[:, None] + o_d[None, :], mask=mine[:, None] & in_d
            )
            at = ((record * HKV + i_h) * D)[:, None] + o_d[None, :]
            gl.store(p_records_k + at, new_k, mask=mask)
            gl.store(p_records_v + at, new_v, mask=mask)
    if ZERO:
        HQ: gl.constexpr = HKV * G
        for n in range(gl.load(batch[2] + batch[6]) + gl.program_id(0), N, gl.num_programs(0)):
            for h in range(0, HQ, PART):
                row = n.to(gl.int64)  # type: ignore[attr-defined]
                at = p_o + (row * HQ + h + o_p)[:, None] * D + o_d[None, :]
                zeros = gl.zeros([PART, D], p_o.dtype.element_ty, CP)
                gl.store(at, zeros, mask=(h + o_p < HQ)[:, None] & in_d)
