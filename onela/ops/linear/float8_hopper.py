"""Float8 products joined with their neighbours, on Hopper: tiles for a shape, and the launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.errors import ShapeError
from onela.ops._device import multiprocessors
from onela.ops.linear import _float8_hopper_kernel as kernel
from onela.ops.linear.float8_reference import BLOCK, check_added_factors, check_block_factors
from onela.ops.linear.joined_hopper import (
    ADDED,
    GATED,
    LAUNCH_CYCLES,
    PLAIN,
    REGISTERS,
    SHARED,
    swizzled,
)
from onela.ops.linear.reference import FLOAT8

WIDE, AT_END, EVERY_BLOCK = (where.value for where in (kernel.WIDE, kernel.AT_END, kernel.EVERY_BLOCK))
BY_ROWS, BY_COLUMNS = kernel.BY_ROWS.value, kernel.BY_COLUMNS.value
STAGE = 128
"""Bytes of a row that a stage holds."""


class Tile(NamedTuple):
    """A tile of the product: 64 rows for one warpgroup or each of two, or what two share otherwise, and its columns."""

    groups: int
    columns: int
    split: int = BY_ROWS

    @property
    def rows(self) -> int:
        """Of the result."""
        return 64 * self.groups if self.split == BY_ROWS else 64


TILES: dict[int, tuple[Tile, ...]] = {
    PLAIN: (Tile(2, 256), Tile(2, 256, BY_COLUMNS), Tile(2, 128), Tile(1, 128)),
    GATED: (Tile(2, 256), Tile(2, 256, BY_COLUMNS)),
    ADDED: (Tile(2, 128), Tile(1, 128)),
}


def float8_normed_linear_hopper(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """`float8_normed_linear_ref` in one launch, for what `has_float8_joined` allows. `tile` is picked when it is None.

    Args, Returns, Raises: as in `float8_normed_linear_ref`; out_dtype has 16 bits.
    Aliasing: the weight is read while the kernel before still runs.
    Numerics: sums over a block of 128 columns to some 14 bits of their largest, as the tensor cores make them, then in
        fp32; rounded once; deterministic.
    """
    check_block_factors(x, x_scales, weight, weight_scales, squares)
    o = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    _launch(PLAIN, x, x_scales, weight, weight_scales, o, squares=squares, eps=eps, tile=tile)
    return o


def float8_linear_swiglu_hopper(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`float8_linear_swiglu_ref` in one launch, for what `has_float8_joined` allows. `tile` is picked when it is None.

    Args, Returns, Raises: as in `float8_linear_swiglu_ref`; weight has a multiple of 32 rows.
    Aliasing, Numerics: as in `float8_normed_linear_hopper`; the gated product is made of the sums, and the sigmoid
        exact to 2 units of fp32's last place.
    """
    check_block_factors(x, x_scales, weight, weight_scales, squares)
    o, scales = _blocks_like(x, weight.shape[0] // 2)
    _launch(
        GATED, x, x_scales, weight, weight_scales, o, made_scales=scales, squares=squares, eps=eps, tile=tile
    )
    return o, scales


def added_linear_float8_hopper(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    zero_centered: bool = True,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`added_linear_float8_ref` in one launch, for what `has_float8_added` allows. `tile` is picked when it is None.

    Args, Returns, Writes, Raises: as in `added_linear_float8_ref`; weight has a multiple of 128 rows.
    Aliasing: weight, its scales and norm_weight are read while the kernel before still runs.
    Numerics: as in `float8_normed_linear_hopper`.
    """
    check_added_factors(x, x_scales, weight, weight_scales, residual, norm_weight)
    N, size = x.shape[0], weight.shape[0]
    if size % BLOCK:
        raise ShapeError(f"weight: a multiple of {BLOCK} rows is needed, got {size}")
    o, scales = _blocks_like(x, size)
    squares = torch.empty(size // BLOCK, N, dtype=torch.float32, device=x.device)
    _launch(
        ADDED, x, x_scales, weight, weight_scales, o, made_scales=scales, tile=tile, residual=residual,
        norm_weight=norm_weight, made=squares, zero_centered=zero_centered,
    )  # fmt: skip
    return o, scales, squares


def choose_tile(
    mode: int,
    N: int,
    size: int,
    row_bytes: int,
    processors: int,
    *,
    blocks: bool = True,
) -> Tile:
    """The tile with which a product is through first, by `cycles`.

    Args:
        N, size, row_bytes, processors: as in `cycles`.
        blocks: whether the rows have a scale for every block; else warpgroups share rows alone.
    """
    fitting = (tile for tile in TILES[mode] if blocks or tile.split == BY_ROWS)
    return min(fitting, key=lambda tile: cycles(mode, N, size, row_bytes, processors, tile))


def cycles(mode: int, N: int, size: int, row_bytes: int, processors: int, tile: Tile) -> int:
    """What a multiprocessor spends on its share of a product, as in `joined_hopper`.

    Args:
        N: rows. size: columns of the result. row_bytes: of a row of either factor. processors: of the device.
    """
    count = triton.cdiv(N, tile.rows) * triton.cdiv(size, tile.columns // (1 + (mode == GATED)))
    # To multiply, or to take a stage in and to give it to the warpgroups, which then bring sums to a block's scale.
    given = tile.rows + tile.columns * tile.groups if tile.split == BY_ROWS else 2 * tile.rows + tile.columns
    stage = max(tile.rows * tile.columns // 32, tile.rows + tile.columns + given)
    ends = 900 + tile.rows * tile.columns // 8
    return triton.cdiv(count, processors) * (triton.cdiv(row_bytes, STAGE) * stage + ends) + LAUNCH_CYCLES


def launch_sizes(mode: int, tile: Tile, *, blocks: bool) -> tuple[int, int, int]:
    """Columns of the result that a tile covers, stages of its ring, and buffers for a warpgroup's results.

    Args:
        blocks: whether the rows have a scale for every block.
    """
    step = tile.columns // 2 if mode == GATED else tile.columns
    rounded = mode in (GATED, ADDED)
    # Halves of 256 columns leave one after the other, and need not wait for each other.
    buffers = 1 if rounded or tile.columns == BLOCK or tile.split == BY_COLUMNS else 2
    used = 64 * tile.groups * BLOCK * (1 if rounded else 2) * buffers
    if mode == GATED and tile.split == BY_COLUMNS:
        used += 4 * 64 * BLOCK
    stage = STAGE * (tile.rows + tile.columns) + 4 * tile.rows * blocks
    return step, min(12, (SHARED - used) // stage), buffers


def _launch(
    mode: int,
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    o: Tensor,
    *,
    tile: Tile | None,
    made_scales: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    made: Tensor | None = None,
    zero_centered: bool = False,
) -> None:
    N, D = x.shape
    size = o.shape[1]
    if N == 0 or size == 0:
        return
    processors = multiprocessors(x.device)
    width = x.element_size()
    scales = WIDE if x_scales is None else AT_END if len(x_scales) == 1 else EVERY_BLOCK
    blocks = scales == EVERY_BLOCK
    tile = tile or choose_tile(mode, N, size, D * width, processors, blocks=blocks)
    if tile.split == BY_COLUMNS and not blocks:
        raise ShapeError("tile: two warpgroups share columns only where rows have a scale for every block")
    step, stages, buffers = launch_sizes(mode, tile, blocks=blocks)
    rows, depth = tile.rows, STAGE // width
    num_m, num_n = triton.cdiv(N, rows), triton.cdiv(size, step)
    unused = o
    x_desc = TensorDescriptor.from_tensor(x, [rows, depth], swizzled(depth, width))
    s_desc = x_desc
    if x_scales is None:
        x_scales = unused
    elif blocks:
        x_scales = _lined(x_scales)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        s_desc = TensorDescriptor(x_scales, [len(x_scales) * _line(N)], [1], [rows], layout)
    else:
        x_scales = x_scales.contiguous()
    kernel.float8_product_hopper_kernel[(min(processors, num_m * num_n),)](
        x_desc,
        TensorDescriptor.from_tensor(weight, [step, depth], swizzled(depth, width)),
        s_desc,
        TensorDescriptor.from_tensor(o, [64, BLOCK], swizzled(BLOCK, o.element_size())),
        x_scales,
        _line(N),
        unused if weight_scales is None else weight_scales,
        unused if made_scales is None else made_scales,
        unused if residual is None else residual,
        unused if norm_weight is None else norm_weight,
        unused if made is None else made,
        unused if squares is None else squares,
        num_m, num_n, triton.cdiv(D, depth), size, N, 0 if residual is None else residual.stride(0), float(D), eps,
        STAGES=stages, MODE=mode, SCALES=scales, PARTS=0 if squares is None else squares.shape[0],
        GROUPS=tile.groups, SPLIT=tile.split, BN=tile.columns, BUFFERS=buffers, CENTERED=zero_centered,
        REGISTERS=REGISTERS, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _line(N: int) -> int:
    """Numbers between a block's scales and the next one's: whole tiles, as the copy engine takes them."""
    return triton.cdiv(N, 128) * 128


def _blocks_like(x: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Room for rows in float8 and the scales of their blocks."""
    N = x.shape[0]
    values = torch.empty(N, D, dtype=FLOAT8, device=x.device)
    scales = torch.empty(triton.cdiv(D, BLOCK), _line(N), dtype=torch.float32, device=x.device)
    return values, scales[:, :N]


def _lined(scales: Tensor) -> Tensor:
    """Scales of blocks as `_blocks_like` lays them, copied unless they lie so."""
    blocks, N = scales.shape
    held = scales.untyped_storage().nbytes() // scales.element_size() - scales.storage_offset()
    if scales.stride() == (_line(N), 1) and held >= blocks * _line(N):
        return scales
    return F.pad(scales, (0, _line(N) - N))[:, :N]
