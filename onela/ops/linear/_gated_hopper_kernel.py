# mypy: disable-error-code="no-untyped-def"
"""The MLP's gated product for Hopper (Triton Gluon), in tiles of two widths that together fill the device.

As the joined products, but after tiles of 128 columns of the result come some of 96, so that a last round of tiles that
would leave multiprocessors without work is a shorter one for all. A narrow tile's sums are two products, of 128 and of
64 columns of the weight, each again gate's first.
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

from onela.ops.linear._joined_hopper_kernel import ROWS, SKEW, _place, _send, _silu

# Columns of the result in a wide tile, in a narrow one, and in the pieces in which a narrow one's come and go.
WIDE, NARROW, PIECE = (gl.constexpr(columns) for columns in (128, 96, 32))


@gluon.jit
def _item_place(item, num_m, num_wide, num_narrow):
    """Row of an item's tile, its first column of the result, and whether it is a narrow one."""
    wide_items = num_m * num_wide
    narrow = item >= wide_items
    i_m, i_n = _place(
        gl.where(narrow, item - wide_items, item), num_m, gl.where(narrow, num_narrow, num_wide)
    )
    return i_m, gl.where(narrow, num_wide * WIDE + i_n * NARROW, i_n * WIDE), narrow


@gluon.jit
def _load_weight(descs, stage_w, bar, column, narrow, k, D):
    """Expect a stage and ask for its weights."""
    wide_desc, piece_desc = descs
    ROW_BYTES: gl.constexpr = stage_w.shape[1] * 2
    if narrow:
        mbarrier.expect(bar, 2 * (ROWS + NARROW) * ROW_BYTES)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(
                piece_desc, [column + i * PIECE, k], bar, stage_w.slice(i * PIECE, PIECE)
            )
            tma.async_copy_global_to_shared(
                piece_desc, [D + column + i * PIECE, k], bar, stage_w.slice((2 + i) * PIECE, PIECE)
            )
        tma.async_copy_global_to_shared(
            piece_desc, [column + 2 * PIECE, k], bar, stage_w.slice(4 * PIECE, PIECE)
        )
        tma.async_copy_global_to_shared(
            piece_desc, [D + column + 2 * PIECE, k], bar, stage_w.slice(5 * PIECE, PIECE)
        )
    else:
        mbarrier.expect(bar, 2 * (ROWS + WIDE) * ROW_BYTES)
        tma.async_copy_global_to_shared(wide_desc, [column, k], bar, stage_w.slice(0, WIDE))
        tma.async_copy_global_to_shared(wide_desc, [D + column, k], bar, stage_w.slice(WIDE, WIDE))


@gluon.jit
def _bring(x_desc, w_descs, shared, sizes):
    """The warp that brings in rows and weights."""
    ring_x, ring_w, full, empty, _begun = shared
    num_m, num_wide, num_narrow, num_k, D, _N = sizes
    STAGES: gl.constexpr = ring_x.shape[0]
    BM: gl.constexpr = ring_x.shape[1]
    BK: gl.constexpr = ring_x.shape[2]
    first = gl.program_id(0)
    i_m, column, narrow = _item_place(first, num_m, num_wide, num_narrow)
    ahead = gl.minimum(num_k, STAGES)
    for i in range(ahead):
        _load_weight(w_descs, ring_w.index(i), full.index(i), column, narrow, i * BK, D)
    gdc_wait()
    for i in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [i_m * BM, i * BK], full.index(i), ring_x.index(i))
    place = ahead
    for item in range(first, num_m * (num_wide + num_narrow), gl.num_programs(0)):
        i_m, column, narrow = _item_place(item, num_m, num_wide, num_narrow)
        for i in range(gl.where(item == first, ahead, 0), num_k):
            stage = place % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            _load_weight(w_descs, ring_w.index(stage), bar, column, narrow, i * BK, D)
            tma.async_copy_global_to_shared(x_desc, [i_m * BM, i * BK], bar, ring_x.index(stage))
            place += 1


@gluon.jit
def _gate(acc):
    """silu(left half) * right half."""
    left, right = acc.reshape((ROWS, 2, acc.shape[1] // 2)).permute((0, 2, 1)).split()
    return _silu(left) * right


@gluon.jit
def _begin_other(begun, place, skew, GROUP: gl.constexpr):
    """Let the second warpgroup begin when the first has had a few steps."""
    if GROUP == 0:
        mbarrier.arrive(begun, count=1, pred=place == skew)


@gluon.jit
def _wide_sums(shared, num_k, place, skew, GROUP: gl.constexpr):
    """64 rows of a wide tile, and how many stages have been read."""
    ring_x, ring_w, full, empty, begun = shared
    STAGES: gl.constexpr = ring_x.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDE, 16])
    stage = place % STAGES
    mbarrier.wait(full.index(stage), (place // STAGES) & 1)
    acc = warpgroup_mma(
        ring_x.index(stage).slice(GROUP * ROWS, ROWS), ring_w.index(stage).permute((1, 0)),
        gl.zeros([ROWS, 2 * WIDE], gl.float32, MMA), use_acc=False, is_async=True,
    )  # fmt: skip
    acc = warpgroup_mma_wait(1, deps=[acc])
    place += 1
    for _ in range(1, num_k):
        last = stage
        stage = place % STAGES
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        acc = warpgroup_mma(
            ring_x.index(stage).slice(GROUP * ROWS, ROWS),
            ring_w.index(stage).permute((1, 0)),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(last), count=1)
        _begin_other(begun, place, skew, GROUP)
        place += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage), count=1)
    return acc, place


@gluon.jit
def _add_stage(rows, weight, acc, rest, GROUP: gl.constexpr):
    """Add a stage to both sums of a narrow tile."""
    x = rows.slice(GROUP * ROWS, ROWS)
    acc = warpgroup_mma(x, weight.slice(0, 4 * PIECE).permute((1, 0)), acc, is_async=True)
    rest = warpgroup_mma(x, weight.slice(4 * PIECE, 2 * PIECE).permute((1, 0)), rest, is_async=True)
    return acc, rest


@gluon.jit
def _narrow_sums(shared, num_k, place, skew, GROUP: gl.constexpr):
    """The same of a narrow tile: the sums of 64 columns of the result, those of 32 more, and the stages."""
    ring_x, ring_w, full, empty, begun = shared
    STAGES: gl.constexpr = ring_x.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * PIECE, 16])
    MMA_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PIECE, 16])
    stage = place % STAGES
    mbarrier.wait(full.index(stage), (place // STAGES) & 1)
    acc = gl.zeros([ROWS, 4 * PIECE], gl.float32, MMA)
    rest = gl.zeros([ROWS, 2 * PIECE], gl.float32, MMA_REST)
    acc, rest = _add_stage(ring_x.index(stage), ring_w.index(stage), acc, rest, GROUP)
    acc, rest = warpgroup_mma_wait(2, deps=[acc, rest])
    place += 1
    for _ in range(1, num_k):
        last = stage
        stage = place % STAGES
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        acc, rest = _add_stage(ring_x.index(stage), ring_w.index(stage), acc, rest, GROUP)
        acc, rest = warpgroup_mma_wait(2, deps=[acc, rest])
        mbarrier.arrive(empty.index(last), count=1)
        _begin_other(begun, place, skew, GROUP)
        place += 1
    acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    mbarrier.arrive(empty.index(stage), count=1)
    return acc, rest, place


@gluon.jit
def _factor(p_sums, width, eps, row, N, PARTS: gl.constexpr):
    """The factor of a norm that is not finished, of 64 rows."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDE, 16])
    o_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    for part in gl.static_range(PARTS):
        total += gl.load(p_sums + part * N + o_m, mask=o_m < N, other=0.0)
    return gl.rsqrt(total / width + eps)


@gluon.jit
def _scaled(acc, scale, PARTS: gl.constexpr):
    """Sums under the factor of the norm."""
    if PARTS > 0:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc = acc * gl.convert_layout(scale, LAYOUT, assert_trivial=True)[:, None]
    return acc


@gluon.jit
def _multiply(
    o_descs, norm, shared, staging, sizes, GROUP: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """One of the warpgroups that multiply: 64 rows of every tile."""
    wide_desc, piece_desc = o_descs
    p_sums, width, eps = norm
    num_m, num_wide, num_narrow, num_k, _D, N = sizes
    begun = shared[4]
    out = staging.index(GROUP)
    pieces = out._reinterpret(out.dtype, [4, ROWS, PIECE], PIECES)
    gdc_wait()
    skew = gl.minimum(num_k - 1, SKEW)
    if (skew > 0) & (GROUP == 1):
        mbarrier.wait(begun, 0)
    place = 0
    for item in range(gl.program_id(0), num_m * (num_wide + num_narrow), gl.num_programs(0)):
        i_m, column, narrow = _item_place(item, num_m, num_wide, num_narrow)
        row = i_m * 2 * ROWS + GROUP * ROWS
        scale = 0
        if PARTS > 0:
            scale = _factor(p_sums, width, eps, row, N, PARTS)
        if narrow:
            acc, rest, place = _narrow_sums(shared, num_k, place, skew, GROUP)
            value = _gate(_scaled(acc, scale, PARTS))
            left, right = value.reshape((ROWS, 2, PIECE)).permute((0, 2, 1)).split()
            third = _gate(_scaled(rest, scale, PARTS))
            tma.store_wait(0)
            gl.thread_barrier()
            pieces.index(0).store(left.to(out.dtype))
            pieces.index(1).store(right.to(out.dtype))
            pieces.index(2).store(third.to(out.dtype))
            fence_async_shared()
            gl.thread_barrier()
            for i in gl.static_range(3):
                tma.async_copy_shared_to_global(piece_desc, [row, column + i * PIECE], pieces.index(i))
        else:
            sums, place = _wide_sums(shared, num_k, place, skew, GROUP)
            _send(wide_desc, out, _gate(_scaled(sums, scale, PARTS)), row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_wide", "num_narrow", "num_k", "D", "N"])
def gated_product_hopper_kernel(
    x_desc, w_wide_desc, w_piece_desc, o_wide_desc, o_piece_desc, p_sums, num_m, num_wide, num_narrow, num_k, D, N,
    width, eps, STAGES: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as stay on the device at once; each takes every so-many-th tile of the result."""
    dtype: gl.constexpr = x_desc.dtype
    ring_x = gl.allocate_shared_memory(dtype, [STAGES, 2 * ROWS, 64], x_desc.layout)
    ring_w = gl.allocate_shared_memory(dtype, [STAGES, 2 * WIDE, 64], w_wide_desc.layout)
    staging = gl.allocate_shared_memory(dtype, [2, ROWS, WIDE], o_wide_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(begun, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (ring_x, ring_w, full, empty, begun)
    sizes = (num_m, num_wide, num_narrow, num_k, D, N)
    norm = (p_sums, width, eps)
    o_descs = (o_wide_desc, o_piece_desc)
    PIECES: gl.constexpr = o_piece_desc.layout
    gl.warp_specialize(
        [
            (_multiply, (o_descs, norm, shared, staging, sizes, 0, PARTS, PIECES)),
            (_multiply, (o_descs, norm, shared, staging, sizes, 1, PARTS, PIECES)),
            (_bring, (x_desc, (w_wide_desc, w_piece_desc), shared, sizes)),
        ],
        [4, 1],
        [REGISTERS, 40],
    )
