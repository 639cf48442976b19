# mypy: disable-error-code="no-untyped-def"
"""Matrix products of float8 with what comes before and after them, for Hopper (Triton Gluon).

As the joined products: one warp brings rows and weights in, one or two warpgroups multiply and finish their rows. But
rows are rounded in blocks of 128 columns, under a scale each, so that whoever makes a tile of rows can round it without
having seen the rest, and a product's sums over a block, which the tensor cores keep to some 14 bits, are added to fp32
sums under the block's scale. A weight's scale, one a row, and the factor of a norm come last.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onela.ops.linear._joined_hopper_kernel import (
    ADDED,
    GATED,
    ROWS,
    _load_weight,
    _place,
    _send,
    _silu,
)

# Columns of rows that share a scale, and of the parts in which a tile is finished.
BLOCK = gl.constexpr(128)
# Where the rows' scales go: there are none; to the end, one a row; to every block.
WIDE, AT_END, EVERY_BLOCK = (gl.constexpr(i) for i in range(3))
# What two warpgroups share a tile by: its rows, 64 for each, or its columns, 128 for each.
BY_ROWS, BY_COLUMNS = (gl.constexpr(i) for i in range(2))
LARGEST = gl.constexpr(448.0)
LEAST = gl.constexpr(2.0**-40)
INFINITY = gl.constexpr(0x7F800000)


@gluon.jit
def _fill(descs, shared, i_m, column, step, stage, scale_stride, D, MODE: gl.constexpr, PART: gl.constexpr):
    """Expect a stage and ask for its weights (PART 0), for its rows and their scales (1), or for all (2)."""
    x_desc, w_desc, s_desc = descs
    ring_x, ring_w, ring_s, full, _empty = shared
    BM: gl.constexpr = ring_x.shape[1]
    BK: gl.constexpr = ring_x.shape[2]
    SCALED: gl.constexpr = ring_s.dtype == gl.float32
    BYTES: gl.constexpr = (BM + ring_w.shape[1]) * BK * ring_x.dtype.primitive_bitwidth // 8 + 4 * BM * SCALED
    bar = full.index(stage)
    if PART != 1:
        mbarrier.expect(bar, BYTES)
        _load_weight(w_desc, ring_w.index(stage), bar, column, step * BK, D, MODE)
    if PART != 0:
        tma.async_copy_global_to_shared(x_desc, [i_m * BM, step * BK], bar, ring_x.index(stage))
        if SCALED:
            tma.async_copy_global_to_shared(
                s_desc, [step * scale_stride + i_m * BM], bar, ring_s.index(stage)
            )


@gluon.jit
def _bring(descs, shared, sizes, scale_stride, MODE: gl.constexpr):
    """The warp that brings in rows, their scales and weights."""
    empty = shared[4]
    num_m, num_n, num_k, D, _N = sizes
    STAGES: gl.constexpr = empty.shape[0]
    first = gl.program_id(0)
    i_m, i_n = _place(first, num_m, num_n)
    ahead = gl.minimum(num_k, STAGES)
    for i in range(ahead):
        _fill(descs, shared, i_m, i_n, i, i, scale_stride, D, MODE, 0)
    gdc_wait()
    for i in range(ahead):
        _fill(descs, shared, i_m, i_n, i, i, scale_stride, D, MODE, 1)
    place = ahead
    for item in range(first, num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(item, num_m, num_n)
        for i in range(gl.where(item == first, ahead, 0), num_k):
            mbarrier.wait(empty.index(place % STAGES), ((place // STAGES) & 1) ^ 1)
            _fill(descs, shared, i_m, i_n, i, place % STAGES, scale_stride, D, MODE, 2)
            place += 1


@gluon.jit
def _product(shared, place, ROW: gl.constexpr, FIRST: gl.constexpr):
    """Begin the product of a stage's 64 rows with 128 columns."""
    ring_x, ring_w = shared[0], shared[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    stage = place % ring_x.shape[0]
    return warpgroup_mma(
        ring_x.index(stage).slice(ROW, ROWS),
        ring_w.index(stage).slice(FIRST, BLOCK).permute((1, 0)),
        gl.zeros([ROWS, BLOCK], gl.float32, MMA),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _await(shared, place):
    """Wait until a stage is filled."""
    full = shared[3]
    mbarrier.wait(full.index(place % full.shape[0]), (place // full.shape[0]) & 1)


@gluon.jit
def _scale(shared, place, like, ROW: gl.constexpr):
    """Scales of a stage's 64 rows, as columns."""
    ring_s = shared[2]
    scale = ring_s.index(place % ring_s.shape[0]).slice(ROW, ROWS).load(gl.SliceLayout(1, like.type.layout))
    return scale[:, None]


@gluon.jit
def _release(shared, place):
    """Let a stage be filled anew."""
    empty = shared[4]
    mbarrier.arrive(empty.index(place % empty.shape[0]), count=1)


@gluon.jit
def _running_sums(shared, num_k, place, BN: gl.constexpr, ROW: gl.constexpr):
    """All columns of a tile in the tensor cores' own sums, which are brought to a block's scale before it is added.

    The other warpgroup multiplies while this one does that.
    """
    ring_x, ring_w = shared[0], shared[1]
    STAGES: gl.constexpr = ring_x.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    acc = gl.zeros([ROWS, BN], gl.float32, MMA)
    _await(shared, place)
    scale = _scale(shared, place, acc, ROW)
    largest = scale
    stage = place % STAGES
    acc = warpgroup_mma(
        ring_x.index(stage).slice(ROW, ROWS),
        ring_w.index(stage).permute((1, 0)),
        acc,
        use_acc=False,
        is_async=True,
    )
    acc = warpgroup_mma_wait(1, deps=[acc])
    for _ in range(1, num_k):
        place += 1
        _await(shared, place)
        following = _scale(shared, place, acc, ROW)
        # What is smaller than another block by so much does not count, and would make the sums overflow.
        largest = gl.where(following > largest, following, largest)
        least = largest * LEAST
        following = gl.where(following < least, least, following)
        ratio = scale / following
        scale = following
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(shared, place - 1)
        acc = acc * ratio
        stage = place % STAGES
        acc = warpgroup_mma(
            ring_x.index(stage).slice(ROW, ROWS), ring_w.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(shared, place)
    return acc * scale, place + 1


@gluon.jit
def _block_sums_128(shared, num_k, place, ROW: gl.constexpr, FIRST: gl.constexpr):
    """128 columns, two blocks at a time: while one block's sums are added the other is multiplied."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    acc = gl.zeros([ROWS, BLOCK], gl.float32, MMA)
    for _ in range(num_k // 2):
        _await(shared, place)
        even = _product(shared, place, ROW, FIRST)
        _await(shared, place + 1)
        odd = _product(shared, place + 1, ROW, FIRST)
        scale = _scale(shared, place, acc, ROW)
        odd_scale = _scale(shared, place + 1, acc, ROW)
        even = warpgroup_mma_wait(1, deps=[even])
        _release(shared, place)
        acc += even * scale
        odd = warpgroup_mma_wait(0, deps=[odd])
        _release(shared, place + 1)
        acc += odd * odd_scale
        place += 2
    if num_k % 2 == 1:
        _await(shared, place)
        even = _product(shared, place, ROW, FIRST)
        scale = _scale(shared, place, acc, ROW)
        even = warpgroup_mma_wait(0, deps=[even])
        _release(shared, place)
        acc += even * scale
        place += 1
    return acc, place


@gluon.jit
def _sums(shared, num_k, place, BN: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr):
    """All columns of a tile in the tensor cores' own sums."""
    ring_x, ring_w = shared[0], shared[1]
    STAGES: gl.constexpr = ring_x.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, K])
    _await(shared, place)
    stage = place % STAGES
    acc = warpgroup_mma(
        ring_x.index(stage).slice(ROW, ROWS), ring_w.index(stage).permute((1, 0)),
        gl.zeros([ROWS, BN], gl.float32, MMA), use_acc=False, is_async=True,
    )  # fmt: skip
    acc = warpgroup_mma_wait(1, deps=[acc])
    for _ in range(1, num_k):
        place += 1
        _await(shared, place)
        stage = place % STAGES
        acc = warpgroup_mma(
            ring_x.index(stage).slice(ROW, ROWS),
            ring_w.index(stage).permute((1, 0)),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
        _release(shared, place - 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(shared, place)
    return acc, place + 1


@gluon.jit
def _round_block(value):
    """64 rows of a block for float8, and their scales, which are NaN for those that hold NaN or infinity."""
    # Magnitudes are ordered as their bits are, NaN above all.
    largest = gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = gl.maximum(largest.to(gl.float32, bitcast=True), 1e-30) / LARGEST
    scale = gl.where(largest < INFINITY, scale, float("nan"))
    return value * (1.0 / scale)[:, None], scale


@gluon.jit
def _send_rounded(o_desc, out, scales, value, row, column, N):
    """Round 64 rows of a block and send them with their scales."""
    p_scales, stride = scales
    rounded, scale = _round_block(value)
    o_m = row + gl.arange(0, ROWS, layout=scale.type.layout)
    gl.store(p_scales + column // BLOCK * stride + o_m, scale, mask=o_m < N)
    _send(o_desc, out, rounded, row, column)


@gluon.constexpr_function
def _power_of_two(number):
    """The next power of two, at least 2."""
    return max(2, 1 << (number - 1).bit_length())


@gluon.jit
def _ask(p, first, size, NUMBERS: gl.constexpr):
    """Ask for numbers that a tile's end needs: few registers hold them until then, and nobody waits for them."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, NUMBERS, layout=LINE)
    return gl.load(p + first + at, mask=at < size, other=0.0)


@gluon.jit
def _ask_squares(p_sums, row, N, PARTS: gl.constexpr, POWER: gl.constexpr):
    """The same of the sums of squares of 64 rows."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0])
    o_p = gl.arange(0, POWER, layout=gl.SliceLayout(1, LINES))
    o_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LINES))
    mask = (o_p < PARTS)[:, None] & (o_m < N)[None, :]
    return gl.load(p_sums + o_p[:, None] * N + o_m[None, :], mask=mask, other=0.0)


@gluon.jit
def _columns(value, column, size):
    """Columns of a block, and which of them there are."""
    o_n = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, value.type.layout))
    return o_n, o_n < size


@gluon.jit
def _weighted(value, scales, SCALES: gl.constexpr):
    """Sums under the scales of the weight's rows."""
    if SCALES != WIDE:
        value = value * gl.convert_layout(scales, gl.SliceLayout(0, value.type.layout))[None, :]
    return value


@gluon.jit
def _before(rest, like, row, column, N):
    """64 rows of the residual, where they lie, and which of them there are."""
    p_h, stride_h = rest[0], rest[1]
    LAYOUT: gl.constexpr = like.type.layout
    o_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_n = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    at = p_h + (o_m.to(gl.int64) * stride_h)[:, None] + o_n[None, :]
    mask = (o_m < N)[:, None]
    return gl.load(at, mask=mask, other=0.0), at, mask


@gluon.jit
def _hand_over(exchange, count, value):
    """Leave sums for the other warpgroup."""
    room, ready, free = exchange
    mbarrier.wait(free, (count & 1) ^ 1)
    room.store(value)
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _take_over(exchange, count, like):
    """The sums that the other warpgroup has left."""
    room, ready, free = exchange
    mbarrier.wait(ready, count & 1)
    value = room.load(like.type.layout)
    gl.thread_barrier()
    mbarrier.arrive(free, count=1)
    return value


@gluon.jit
def _multiply(
    given, shared, GROUP: gl.constexpr, MODE: gl.constexpr, SCALES: gl.constexpr, SPLIT: gl.constexpr,
    PARTS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """One of the warpgroups that multiply: its share of every tile."""
    o_desc, p_x_scales, rest, staging, exchange, sizes = given
    _p_h, _stride_h, p_w_scales, o_scales, p_norm, p_squares, p_sums, width, eps = rest
    ring_x, ring_w = shared[0], shared[1]
    num_m, num_n, num_k, D, N = sizes
    POWER: gl.constexpr = _power_of_two(PARTS)
    BM: gl.constexpr = ring_x.shape[1]
    BN: gl.constexpr = ring_w.shape[1]
    K: gl.constexpr = 256 // ring_x.dtype.primitive_bitwidth
    ROW: gl.constexpr = GROUP * ROWS if SPLIT == BY_ROWS else 0
    # Of a tile's halves, whether this group has both, and the one that it begins with.
    BOTH: gl.constexpr = BN == 2 * BLOCK and SPLIT == BY_ROWS
    HALF: gl.constexpr = GROUP if SPLIT == BY_COLUMNS else 0
    GIVES: gl.constexpr = GROUP == 1 and SPLIT == BY_COLUMNS and MODE == GATED
    TAKES: gl.constexpr = GROUP == 0 and SPLIT == BY_COLUMNS and MODE == GATED
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK if SCALES == EVERY_BLOCK else BN, K]
    )
    out = staging.index(GROUP)
    gdc_wait()
    place = 0
    for item in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(item, num_m, num_n)
        row = i_m * BM + ROW
        o_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        there = o_m < N
        column = i_n * (BLOCK if MODE == GATED else BN)
        if PARTS > 0:
            squares = _ask_squares(p_sums, row, N, PARTS, POWER)
        # Where the second half's rows of the weight begin.
        second = D if MODE == GATED else BLOCK
        left_n = D - column - (0 if MODE == GATED else HALF * BLOCK)
        if SCALES != WIDE:
            scales = _ask(p_w_scales, column + HALF * second, left_n, BLOCK)
            if BOTH:
                right_scales = _ask(
                    p_w_scales, column + second, D - column - (0 if MODE == GATED else BLOCK), BLOCK
                )
        if SCALES == AT_END:
            own_scales = _ask(p_x_scales, row, N - row, ROWS)
        if MODE == ADDED:
            norm = _ask(p_norm, column, D, BLOCK)
        if MODE == ADDED and SCALES != EVERY_BLOCK:
            before, at, mask = _before(rest, gl.zeros([ROWS, BLOCK], gl.float32, MMA), row, column, N)
        if SCALES == EVERY_BLOCK:
            if BOTH:
                left, place = _running_sums(shared, num_k, place, BN, ROW)
                left, right = left.reshape((ROWS, 2, BLOCK)).permute((0, 2, 1)).split()
            else:
                left, place = _block_sums_128(shared, num_k, place, ROW, HALF * BLOCK)
        else:
            left, place = _sums(shared, num_k, place, BN, K, ROW)
            if SCALES == AT_END:
                left = left * gl.convert_layout(own_scales, gl.SliceLayout(1, left.type.layout))[:, None]
            if BOTH:
                left, right = left.reshape((ROWS, 2, BLOCK)).permute((0, 2, 1)).split()
        if MODE == ADDED and SCALES == EVERY_BLOCK:
            before, at, mask = _before(rest, left, row, column, N)
        left = _weighted(left, scales if SCALES != WIDE else 0, SCALES)
        if BOTH:
            right = _weighted(right, right_scales, SCALES)
        if PARTS > 0:
            total = gl.convert_layout(gl.sum(squares, 0), gl.SliceLayout(1, left.type.layout))
            factor = gl.rsqrt(total / width + eps)
            left = left * factor[:, None]
            if BOTH:
                right = right * factor[:, None]
        if GIVES:
            _hand_over(exchange, (item - gl.program_id(0)) // gl.num_programs(0), left)
        elif MODE == GATED:
            left = _silu(left)
            if TAKES:
                right = _take_over(exchange, (item - gl.program_id(0)) // gl.num_programs(0), left)
            value = left * right
            _o_n, inside = _columns(value, column, D)
            value = gl.where(inside[None, :], value, 0.0)
            _send_rounded(o_desc, out, o_scales, value, row, column, N)
        elif MODE == ADDED:
            value = left + before
            gl.store(at, value, mask=mask)
            gl.store(p_squares + i_n * N + o_m, gl.sum(value * value, 1), mask=there)
            weight = gl.convert_layout(norm.to(gl.float32), gl.SliceLayout(0, value.type.layout))
            if CENTERED:
                weight += 1.0
            _send_rounded(o_desc, out, o_scales, value * weight[None, :], row, column, N)
        else:
            _send(o_desc, out, left, row, column + HALF * BLOCK)
            if BOTH:
                _send(o_desc, staging.index(GROUP + staging.shape[0] // 4 * 2), right, row, column + BLOCK)
    tma.store_wait(0)


@gluon.jit
def _ring(
    x_desc, w_desc, s_desc, STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SCALES: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
    """Stages for rows, weights and scales, and what tells that they are full or have been read."""
    dtype: gl.constexpr = x_desc.dtype
    DEPTH: gl.constexpr = 1024 // dtype.primitive_bitwidth
    ring_x = gl.allocate_shared_memory(dtype, [STAGES, BM, DEPTH], x_desc.layout)
    ring_w = gl.allocate_shared_memory(dtype, [STAGES, BN, DEPTH], w_desc.layout)
    ring_s = ring_x
    if SCALES == EVERY_BLOCK:
        ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return ring_x, ring_w, ring_s, full, empty


@gluon.jit(do_not_specialize=["num_m", "num_n", "num_k", "D", "N", "scale_stride"])
def float8_product_hopper_kernel(
    x_desc, w_desc, s_desc, o_desc, p_x_scales, scale_stride, p_w_scales, p_o_scales, p_h, p_norm, p_squares, p_sums,
    num_m, num_n, num_k, D, N, stride_h, width, eps, STAGES: gl.constexpr, MODE: gl.constexpr, SCALES: gl.constexpr,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, SPLIT: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr,
    CENTERED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes every so-many-th tile of the result."""
    dtype: gl.constexpr = x_desc.dtype
    DEPTH: gl.constexpr = 1024 // dtype.primitive_bitwidth
    BM: gl.constexpr = GROUPS * ROWS if SPLIT == BY_ROWS else ROWS
    ring_x = gl.allocate_shared_memory(dtype, [STAGES, BM, DEPTH], x_desc.layout)
    ring_w = gl.allocate_shared_memory(dtype, [STAGES, BN, DEPTH], w_desc.layout)
    staging = gl.allocate_shared_memory(o_desc.dtype, [GROUPS * BUFFERS, ROWS, BLOCK], o_desc.layout)
    ring_s = ring_x
    if SCALES == EVERY_BLOCK:
        ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    exchange = full
    if SPLIT == BY_COLUMNS and MODE == GATED:
        room = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        mbarrier.init(free, count=1)
        exchange = (room, ready, free)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (ring_x, ring_w, ring_s, full, empty)
    sizes = (num_m, num_n, num_k, D, N)
    rest = (p_h, stride_h, p_w_scales, (p_o_scales, scale_stride), p_norm, p_squares, p_sums, width, eps)
    given = (o_desc, p_x_scales, rest, staging, exchange, sizes)
    descs = (x_desc, w_desc, s_desc)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (given, shared, 0, MODE, SCALES, SPLIT, PARTS, CENTERED)),
                (_multiply, (given, shared, 1, MODE, SCALES, SPLIT, PARTS, CENTERED)),
                (_bring, (descs, shared, sizes, scale_stride, MODE)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (given, shared, 0, MODE, SCALES, SPLIT, PARTS, CENTERED)),
                (_bring, (descs, shared, sizes, scale_stride, MODE)),
            ],
            [1],
            [40],
        )
