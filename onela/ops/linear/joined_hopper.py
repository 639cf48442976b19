"""Joined products on Hopper: tiles for a shape, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.errors import ShapeError
from onela.ops._device import multiprocessors
from onela.ops.linear import _joined_hopper_kernel as kernel
from onela.ops.linear.reference import check_added, check_heads, check_joined

PLAIN, GATED, ADDED, HEADS = (mode.value for mode in (kernel.PLAIN, kernel.GATED, kernel.ADDED, kernel.HEADS))
DEPTH = 64
"""Columns of a stage."""
SHARED = 225 << 10
"""Bytes that stages and results of a program may take."""
REGISTERS = 232
LAUNCH_CYCLES = 2500


class Tile(NamedTuple):
    """A tile of the product: 64 rows for each of `groups` warpgroups, and its columns."""

    groups: int
    columns: int


TILES: dict[int, tuple[Tile, ...]] = {
    PLAIN: (Tile(2, 256), Tile(2, 128), Tile(2, 64), Tile(1, 128), Tile(1, 64)),
    GATED: (Tile(2, 256), Tile(2, 128)),
    ADDED: (Tile(2, 256), Tile(2, 128), Tile(2, 64), Tile(1, 128), Tile(1, 64)),
}


def normed_linear_hopper(
    x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0, tile: Tile | None = None
) -> Tensor:
    """`normed_linear_ref` in one launch, for what `has_joined` allows. `tile` is picked when it is None.

    Args, Returns, Raises: as in `normed_linear_ref`.
    Aliasing: the weight is read while the kernel before still runs.
    Numerics: fp32 sums in steps of the tensor cores, rounded once; deterministic.
    """
    check_joined(x, weight, squares)
    o = x.new_empty(x.shape[0], weight.shape[0])
    _launch(PLAIN, x, weight, o, squares=squares, eps=eps, tile=tile)
    return o


def linear_swiglu_hopper(
    x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0, tile: Tile | None = None
) -> Tensor:
    """`linear_swiglu_ref` in one launch, for what `has_joined` allows. `tile` is picked when it is None.

    Args, Returns, Raises: as in `linear_swiglu_ref`; weight has a multiple of 16 rows.
    Aliasing: as in `normed_linear_hopper`.
    Numerics: as in `normed_linear_hopper`; the gated product is made of the sums, and the sigmoid exact to 2 units of
        fp32's last place.
    """
    check_joined(x, weight, squares)
    o = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(GATED, x, weight, o, squares=squares, eps=eps, tile=tile)
    return o


def added_linear_hopper(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    zero_centered: bool = True,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`added_linear_ref` in one launch, for what `has_joined` allows. `tile` is picked when it is None.

    Args, Returns, Writes, Raises: as in `added_linear_ref`; residual is fp32, weight has a multiple of 64 rows.
    Aliasing: weight and norm_weight are read while the kernel before still runs.
    Numerics: as in `normed_linear_hopper`.
    """
    check_added(x, weight, residual, norm_weight)
    N, size = x.shape[0], weight.shape[0]
    o = x.new_empty(N, size)
    tile = tile or choose_tile(ADDED, N, size, x.shape[1], multiprocessors(x.device))
    squares = x.new_empty(size // tile.columns, N, dtype=torch.float32)
    _launch(
        ADDED, x, weight, o, tile=tile, residual=residual, norm_weight=norm_weight, made=squares,
        zero_centered=zero_centered,
    )  # fmt: skip
    return o, squares


def heads_linear_hopper(
    x: Tensor,
    weight: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    zero_centered: bool = True,
    squares: Tensor | None = None,
    squares_eps: float = 0.0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`heads_linear_ref` in one launch, for what `has_heads` allows. `tile` is picked when it is None.

    Args, Returns, Raises: as in `heads_linear_ref`; cos and sin are contiguous. A tile has the columns of a head.
    Aliasing: as in `normed_linear_hopper`.
    Numerics: as in `normed_linear_hopper`; between the sums and the result cosines and sines alone are rounded.
    """
    gated = check_heads(x, weight, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, squares)
    N, head_dim = x.shape[0], q_weight.shape[0]
    o = x.new_empty(N, weight.shape[0])
    if tile is None:
        tiles = tuple(Tile(groups, head_dim) for groups in (1, 2))
        tile = choose_tile(HEADS, N, o.shape[1], x.shape[1], multiprocessors(x.device), tiles)
    _launch(
        HEADS, x, weight, o, tile=tile, squares=squares, eps=squares_eps, zero_centered=zero_centered,
        heads=(q_weight, k_weight, cos, sin), head_eps=eps, kind=(num_heads, num_kv_heads, int(gated), cos.shape[1]),
    )  # fmt: skip
    # The kernel writes queries, gates, keys, values.
    q, gate, k, v = o.view(N, -1, head_dim).split(
        [num_heads, num_heads * gated, num_kv_heads, num_kv_heads], 1
    )
    return q, k, v, gate if gated else None


def choose_tile(
    mode: int, N: int, size: int, D: int, processors: int, tiles: Sequence[Tile] | None = None
) -> Tile:
    """The tile with which a product is through first, by `cycles`. `tiles`: to choose from; None: all of the mode."""
    fitting = (tile for tile in tiles or TILES[mode] if mode != ADDED or size % tile.columns == 0)
    return min(fitting, key=lambda tile: cycles(mode, N, size, D, processors, tile))


def cycles(mode: int, N: int, size: int, D: int, processors: int, tile: Tile) -> int:
    """What a multiprocessor spends on its share of a product. A launch has its begin and end besides."""
    groups, columns = tile
    count = triton.cdiv(N, 64 * groups) * triton.cdiv(size, columns // (1 + (mode == GATED)))
    # As long as the tensor cores need for a stage, or as shared memory needs to take it in and to give it to every
    # warpgroup, 128 bytes a cycle.
    stage = max(2 * groups * columns, 128 * groups + columns * (groups + 1))
    return triton.cdiv(count, processors) * tile_cycles(D, stage) + LAUNCH_CYCLES


def tile_cycles(D: int, stage: int) -> int:
    """Of one tile whose stages take so many; it has its begin and end, too."""
    return triton.cdiv(D, DEPTH) * stage + 1500


def launch_sizes(mode: int, tile: Tile) -> tuple[int, int, int]:
    """Columns of the result that a tile covers, those that leave at a time, and stages of its ring."""
    step = tile.columns // 2 if mode == GATED else tile.columns
    out = min(step, 128)
    rows = 64 * tile.groups
    return step, out, min(12, (SHARED - 2 * rows * out) // (2 * DEPTH * (rows + tile.columns)))


def _launch(
    mode: int,
    x: Tensor,
    weight: Tensor,
    o: Tensor,
    *,
    tile: Tile | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    made: Tensor | None = None,
    zero_centered: bool = False,
    heads: tuple[Tensor, ...] | None = None,
    head_eps: float = 0.0,
    kind: tuple[int, ...] | None = None,
) -> None:
    N, D = x.shape
    size = o.shape[1]
    if N == 0 or size == 0:
        return
    processors = multiprocessors(x.device)
    tile = tile or choose_tile(mode, N, size, D, processors)
    rows, columns = 64 * tile.groups, tile.columns
    step, out, stages = launch_sizes(mode, tile)
    if mode == ADDED and size % columns:
        raise ShapeError(f"tile: whole tiles of {columns} columns are needed, weight has {size} rows")
    num_m, num_n = triton.cdiv(N, rows), triton.cdiv(size, step)
    unused = x
    kernel.joined_product_hopper_kernel[(min(processors, num_m * num_n),)](
        TensorDescriptor.from_tensor(x, [rows, DEPTH], swizzled(DEPTH)),
        TensorDescriptor.from_tensor(weight, [step, DEPTH], swizzled(DEPTH)),
        TensorDescriptor.from_tensor(o, [64, out], swizzled(out)),
        unused if residual is None else residual,
        unused if norm_weight is None else norm_weight,
        unused if made is None else made,
        unused if squares is None else squares,
        *((unused,) * 4 if heads is None else heads),
        num_m, num_n, triton.cdiv(D, DEPTH), size, N, 0 if residual is None else residual.stride(0), float(D), eps,
        head_eps, STAGES=stages, MODE=mode, PARTS=0 if squares is None else squares.shape[0], GROUPS=tile.groups,
        BN=columns, BO=out, CENTERED=zero_centered, REGISTERS=REGISTERS, KIND=kind, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def swizzled(columns: int, width: int = 2) -> gl.NVMMASharedLayout:
    """How rows of so many columns, each of `width` bytes, lie in shared memory."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, width * columns), element_bitwidth=8 * width, rank=2
    )
