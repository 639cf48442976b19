# mypy: disable-error-code="no-untyped-def"
"""Matrix products with what comes before and after them, for Hopper (Triton Gluon), by warps that have their own jobs.

A program stays on its multiprocessor and takes one tile of the result after another. One warp brings rows and weights
in, by the copy engine, through a ring of stages in shared memory, across the border between two tiles; one or two
warpgroups multiply, 64 rows of the tile each, and finish their rows: nothing of the product itself goes through memory.
The second one begins a little later, so that one's end of a tile runs beside the other's products.

Weights do not depend on the kernel before: they are asked for while it still runs.
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

ROWS = gl.constexpr(64)
# Row tiles that share columns of the weight, one tile after the other, before the next columns come.
BAND = gl.constexpr(20)
# Steps by which the second warpgroup begins later.
SKEW = gl.constexpr(2)
# What becomes of a product: it is the result; its halves become silu(left) * right; it is added to a residual; its
# tiles are heads, of which those of queries and keys are normed and rotated.
PLAIN, GATED, ADDED, HEADS = (gl.constexpr(i) for i in range(4))


@gluon.jit
def _place(item, num_m, num_n):
    """Row and column of an item's tile among the tiles."""
    band = item // (BAND * num_n)
    inside = item % (BAND * num_n)
    height = gl.minimum(num_m - band * BAND, BAND)
    return band * BAND + inside % height, inside // height


@gluon.jit
def _load_weight(w_desc, ring_w, bar, column, k, D, MODE: gl.constexpr):
    BN: gl.constexpr = ring_w.shape[0]
    if MODE == GATED:
        HALF: gl.constexpr = BN // 2
        tma.async_copy_global_to_shared(w_desc, [column * HALF, k], bar, ring_w.slice(0, HALF))
        tma.async_copy_global_to_shared(w_desc, [D + column * HALF, k], bar, ring_w.slice(HALF, HALF))
    else:
        tma.async_copy_global_to_shared(w_desc, [column * BN, k], bar, ring_w)


@gluon.jit
def _bring(descs, shared, sizes, MODE: gl.constexpr):
    """The warp that brings in rows and weights."""
    x_desc, w_desc = descs
    ring_x, ring_w, full, empty, _begun = shared
    num_m, num_n, num_k, D, _N = sizes
    STAGES: gl.constexpr = ring_x.shape[0]
    BM: gl.constexpr = ring_x.shape[1]
    BK: gl.constexpr = ring_x.shape[2]
    BYTES: gl.constexpr = (BM + ring_w.shape[1]) * BK * 2
    first = gl.program_id(0)
    i_m, i_n = _place(first, num_m, num_n)
    ahead = gl.minimum(num_k, STAGES)
    for i in range(ahead):
        mbarrier.expect(full.index(i), BYTES)
        _load_weight(w_desc, ring_w.index(i), full.index(i), i_n, i * BK, D, MODE)
    gdc_wait()
    for i in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [i_m * BM, i * BK], full.index(i), ring_x.index(i))
    place = ahead
    for item in range(first, num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(item, num_m, num_n)
        for i in range(gl.where(item == first, ahead, 0), num_k):
            stage = place % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x_desc, [i_m * BM, i * BK], bar, ring_x.index(stage))
            _load_weight(w_desc, ring_w.index(stage), bar, i_n, i * BK, D, MODE)
            place += 1


@gluon.jit
def _send(o_desc, out, value, row, column):
    """A tile of results through shared memory to where it belongs, by the copy engine."""
    tma.store_wait(0)
    gl.thread_barrier()
    out.store(value.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(o_desc, [row, column], out)


@gluon.jit
def _silu(x):
    """x * sigmoid(x), to fp32's last bits but one or two."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=r,r",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _residual(rest, row, column, N, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where 64 rows of the residual lie, and which of them there are."""
    p_h, _p_norm, _p_squares, _p_sums, stride_h, _width, _eps = rest
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    at = p_h + row.to(gl.int64) * stride_h + column + (o_m * stride_h)[:, None] + o_n[None, :]
    return at, (row + o_m < N)[:, None]


@gluon.jit
def _add(o_desc, out, value, before, rest, row, column, N, LOADED: gl.constexpr, CENTERED: gl.constexpr):
    """Add columns of a product to the residual, send on the sum under the norm's weight: its rows' sums of squares."""
    p_norm = rest[1]
    LAYOUT: gl.constexpr = value.type.layout
    at, mask = _residual(rest, row, column, N, value.shape[1], LAYOUT)
    if not LOADED:
        before = gl.load(at, mask=mask, other=0.0)
    value += before
    gl.store(at, value, mask=mask)
    o_n = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    factor = gl.load(p_norm + column + o_n).to(gl.float32)
    if CENTERED:
        factor += 1.0
    _send(o_desc, out, value * factor[None, :], row, column)
    return gl.sum(value * value, 1)


@gluon.jit
def _halves(x):
    """The left and the right half of 64 rows. Nothing moves: a thread holds the same columns of both."""
    return x.reshape((ROWS, 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _side_by_side(left, right):
    """What `_halves` took apart."""
    return gl.join(left, right).permute((0, 2, 1)).reshape((ROWS, 2 * left.shape[1]))


@gluon.jit
def _first_lines(x, HALF: gl.constexpr):
    """The first HALF columns of 64 rows, as `_turn` has them."""
    left, _right = _halves(x)
    if left.shape[1] == HALF:
        first = left
    else:
        first = _first_lines(left, HALF)
    return first


@gluon.jit
def _turn(x, cos, sin):
    """Rotate pairs (i, i + HALF) of the first columns, as many as there are angles for; the others stay."""
    left, right = _halves(x)
    if left.shape[1] == cos.shape[1]:
        turned = _side_by_side(left * cos - right * sin, right * cos + left * sin)
    else:
        left = gl.convert_layout(_turn(left, cos, sin), right.type.layout, assert_trivial=True)
        turned = _side_by_side(left, right)
    return turned


@gluon.jit
def _angles(heads, like, row, N):
    """Cosines and sines of 64 rows."""
    _p_q_norm, _p_k_norm, p_cos, p_sin, _eps = heads
    LAYOUT: gl.constexpr = like.type.layout
    HALF: gl.constexpr = like.shape[1]
    o_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    at = (o_m * HALF)[:, None] + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    mask = (o_m < N)[:, None]
    return gl.load(p_cos + at, mask=mask, other=0.0), gl.load(p_sin + at, mask=mask, other=0.0)


@gluon.jit
def _norm_and_turn(acc, angles, heads, i_n, KIND: gl.constexpr, CENTERED: gl.constexpr, dtype: gl.constexpr):
    """Norm and rotate 64 rows of a query or key head; gates and values stay. Also where the head's columns belong."""
    p_q_norm, p_k_norm, _p_cos, _p_sin, eps = heads
    NUM_Q: gl.constexpr = KIND[0]
    NUM_K: gl.constexpr = KIND[1]
    MMA: gl.constexpr = acc.type.layout
    EACH: gl.constexpr = 1 + KIND[2]
    BEFORE_K: gl.constexpr = NUM_Q * EACH
    is_q = (i_n < BEFORE_K) & (i_n % EACH == 0)
    is_k = (i_n >= BEFORE_K) & (i_n < BEFORE_K + NUM_K)
    if is_q | is_k:
        cos, sin = angles
        o_n = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
        factor = gl.load(gl.where(is_q, p_q_norm, p_k_norm) + o_n).to(gl.float32)
        if CENTERED:
            factor += 1.0
        scale = gl.rsqrt(gl.sum(acc * acc, 1) / acc.shape[1] + eps)
        acc = acc * scale[:, None] * factor[None, :]
        # As the rotated rows' dtype has the angles.
        acc = _turn(acc, cos.to(dtype).to(gl.float32), sin.to(dtype).to(gl.float32))
        acc = gl.convert_layout(acc, MMA, assert_trivial=True)
    if EACH == 2:
        i_n = gl.where(i_n < BEFORE_K, i_n // 2 + (i_n % 2) * NUM_Q, i_n)
    return acc, i_n


@gluon.jit
def _finish(
    o_desc, out, acc, before, rest, row, i_n, N, BN: gl.constexpr, MODE: gl.constexpr, LOADED: gl.constexpr,
    CENTERED: gl.constexpr,
):  # fmt: skip
    """What becomes of 64 rows of a tile."""
    p_squares = rest[2]
    BO: gl.constexpr = out.shape[1]
    if MODE == ADDED:
        if BO == BN:
            squares = _add(o_desc, out, acc, before, rest, row, i_n * BN, N, LOADED, CENTERED)
        else:
            left, right = acc.reshape((ROWS, 2, BN // 2)).permute((0, 2, 1)).split()
            squares = _add(o_desc, out, left, before, rest, row, i_n * BN, N, False, CENTERED)
            squares += _add(o_desc, out, right, before, rest, row, i_n * BN + BO, N, False, CENTERED)
        o_m = row + gl.arange(0, ROWS, layout=squares.type.layout)
        gl.store(p_squares + i_n * N + o_m, squares, mask=o_m < N)
    elif MODE != GATED and BO == BN:
        _send(o_desc, out, acc, row, i_n * BN)
    else:
        left, right = acc.reshape((ROWS, 2, BN // 2)).permute((0, 2, 1)).split()
        if MODE == GATED:
            _send(o_desc, out, _silu(left) * right, row, i_n * BO)
        else:
            _send(o_desc, out, left, row, i_n * BN)
            _send(o_desc, out, right, row, i_n * BN + BO)


@gluon.jit
def _multiply(
    o_desc, rest, heads, shared, staging, sizes, GROUP: gl.constexpr, MODE: gl.constexpr, PARTS: gl.constexpr,
    CENTERED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One of the warpgroups that multiply: 64 rows of every tile."""
    _p_h, _p_norm, _p_squares, p_sums, _stride_h, width, eps = rest
    ring_x, ring_w, full, empty, begun = shared
    num_m, num_n, num_k, _D, N = sizes
    STAGES: gl.constexpr = ring_x.shape[0]
    BM: gl.constexpr = ring_x.shape[1]
    BN: gl.constexpr = ring_w.shape[1]
    GROUPS: gl.constexpr = staging.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zeros = gl.zeros([ROWS, BN], gl.float32, MMA)
    out = staging.index(GROUP)
    # What a tile is added to is asked for before its sum begins, where there are registers for both.
    LOADED: gl.constexpr = MODE == ADDED and out.shape[1] == BN
    if MODE == HEADS:
        like = _first_lines(zeros, KIND[3])
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    gdc_wait()
    skew = gl.minimum(num_k - 1, SKEW)
    if (skew > 0) & (GROUP == 1):
        mbarrier.wait(begun, 0)
    place = 0
    for item in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(item, num_m, num_n)
        row = i_m * BM + GROUP * ROWS
        if PARTS > 0:
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
            for part in gl.static_range(PARTS):
                total += gl.load(p_sums + part * N + row + o_m, mask=row + o_m < N, other=0.0)
            scale = gl.rsqrt(total / width + eps)
        before = 0
        if LOADED:
            at, mask = _residual(rest, row, i_n * BN, N, BN, MMA)
            before = gl.load(at, mask=mask, other=0.0)
        if MODE == HEADS:
            before = _angles(heads, like, row, N)
        stage = place % STAGES
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        acc = warpgroup_mma(
            ring_x.index(stage).slice(GROUP * ROWS, ROWS), ring_w.index(stage).permute((1, 0)), zeros,
            use_acc=False, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        place += 1
        for _ in range(1, num_k):
            last = stage
            stage = place % STAGES
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            acc = warpgroup_mma(
                ring_x.index(stage).slice(GROUP * ROWS, ROWS), ring_w.index(stage).permute((1, 0)), acc,
                is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(last), count=1)
            if GROUP == 0 and GROUPS == 2:
                mbarrier.arrive(begun, count=1, pred=place == skew)
            place += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        if PARTS > 0:
            acc = acc * scale[:, None]
        if MODE == HEADS:
            acc, i_n = _norm_and_turn(acc, before, heads, i_n, KIND, CENTERED, out.dtype)
        _finish(o_desc, out, acc, before, rest, row, i_n, N, BN, MODE, LOADED, CENTERED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_n", "num_k", "D", "N"])
def joined_product_hopper_kernel(
    x_desc, w_desc, o_desc, p_h, p_norm, p_squares, p_sums, p_q_norm, p_k_norm, p_cos, p_sin, num_m, num_n, num_k, D, N,
    stride_h, width, eps, head_eps, STAGES: gl.constexpr, MODE: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr,
    BN: gl.constexpr, BO: gl.constexpr, CENTERED: gl.constexpr, REGISTERS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes every so-many-th tile of the result."""
    dtype: gl.constexpr = x_desc.dtype
    ring_x = gl.allocate_shared_memory(dtype, [STAGES, GROUPS * ROWS, 64], x_desc.layout)
    ring_w = gl.allocate_shared_memory(dtype, [STAGES, BN, 64], w_desc.layout)
    staging = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, BO], o_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    mbarrier.init(begun, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (ring_x, ring_w, full, empty, begun)
    sizes = (num_m, num_n, num_k, D, N)
    rest = (p_h, p_norm, p_squares, p_sums, stride_h, width, eps)
    heads = (p_q_norm, p_k_norm, p_cos, p_sin, head_eps)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (o_desc, rest, heads, shared, staging, sizes, 0, MODE, PARTS, CENTERED, KIND),
                ),
                (
                    _multiply,
                    (o_desc, rest, heads, shared, staging, sizes, 1, MODE, PARTS, CENTERED, KIND),
                ),
                (_bring, ((x_desc, w_desc), shared, sizes, MODE)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (o_desc, rest, heads, shared, staging, sizes, 0, MODE, PARTS, CENTERED, KIND),
                ),
                (_bring, ((x_desc, w_desc), shared, sizes, MODE)),
            ],
            [1],
            [40],
        )
