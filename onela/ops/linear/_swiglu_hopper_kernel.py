# mypy: disable-error-code="no-untyped-def"
"""Gate, up and their product in one launch for Hopper (Triton Gluon), by warps that have their own jobs.

A program stays on its multiprocessor and takes one tile after another: 128 rows of x, and so many rows of gate's weight
and the same ones of up's. A warp streams both by the copy engine through one ring in shared memory. Two warpgroups
multiply, 64 rows each, each at its own pace, so that one's `silu(gate) * up` runs beside the other's products.
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

ROWS = gl.constexpr(64)


@gluon.jit
def _tile(tile, num_m, num_n, GROUP_M: gl.constexpr):
    """Row and column of a tile. Tiles that run at a time are near each other in both, for the L2 cache's sake."""
    group = tile // (GROUP_M * num_n)
    inside = tile % (GROUP_M * num_n)
    first = group * GROUP_M
    height = gl.minimum(num_m - first, GROUP_M)
    return first + inside % height, inside // height


@gluon.jit
def _stream(descs, shared, sizes, GROUP_M: gl.constexpr):
    x_desc, w_desc, _o_desc = descs
    x_ring, w_ring, _o_tile, full, empty, _begun = shared
    num_m, num_n, num_k, D = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    HALF: gl.constexpr = w_ring.shape[1] // 2
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    place = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _tile(tile, num_m, num_n, GROUP_M)
        for k in range(num_k):
            stage = place % STAGES
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (BLOCK_M + 2 * HALF) * BLOCK_K * 2)
            w = w_ring.index(stage)
            tma.async_copy_global_to_shared(x_desc, [i_m * BLOCK_M, k * BLOCK_K], bar, x_ring.index(stage))
            tma.async_copy_global_to_shared(w_desc, [i_n * HALF, k * BLOCK_K], bar, w.slice(0, HALF))
            tma.async_copy_global_to_shared(w_desc, [D + i_n * HALF, k * BLOCK_K], bar, w.slice(HALF, HALF))
            place += 1


@gluon.jit
def _multiply(descs, shared, sizes, PART: gl.constexpr, GROUP_M: gl.constexpr, SKEW: gl.constexpr):
    """One of the two multiplying warpgroups: 64 rows of every tile."""
    _x_desc, _w_desc, o_desc = descs
    x_ring, w_ring, o_tile, full, empty, begun = shared
    num_m, num_n, num_k, _D = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, MMA)
    out = o_tile.index(PART)
    place = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _tile(tile, num_m, num_n, GROUP_M)
        if (SKEW > 0) & (PART == 1):
            # Without this both would leave the products at the same time, tile after tile.
            mbarrier.wait(begun, 0)
        stage = place % STAGES
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        x = x_ring.index(stage).slice(PART * ROWS, ROWS)
        acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        for _ in range(1, num_k):
            last = stage
            place += 1
            stage = place % STAGES
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            x = x_ring.index(stage).slice(PART * ROWS, ROWS)
            acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(last), count=1)
            if (SKEW > 0) & (PART == 0):
                mbarrier.arrive(begun, count=1, pred=(place == SKEW) & (tile == gl.program_id(0)))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        place += 1
        gate, up = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, HALF]), [0, 2, 1]))
        product = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up
        tma.store_wait(0)
        out.store(product.to(o_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [i_m * BLOCK_M + PART * ROWS, i_n * HALF], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_n", "num_k", "D"])
def linear_swiglu_hopper_kernel(
    x_desc, w_desc, o_desc, num_m, num_n, num_k, D,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SKEW: gl.constexpr,
):  # fmt: skip
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    o_tile = gl.allocate_shared_memory(o_desc.dtype, [2, ROWS, BLOCK_N // 2], o_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(begun, count=1)
    fence_async_shared()
    descs = (x_desc, w_desc, o_desc)
    shared = (x_ring, w_ring, o_tile, full, empty, begun)
    sizes = (num_m, num_n, num_k, D)
    gl.warp_specialize(
        [
            (_multiply, (descs, shared, sizes, 0, GROUP_M, SKEW)),
            (_multiply, (descs, shared, sizes, 1, GROUP_M, SKEW)),
            (_stream, (descs, shared, sizes, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )
