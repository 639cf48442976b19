"""The MLP's gated product on Hopper in tiles of two widths: how many of each, and the launch."""

from __future__ import annotations

from functools import lru_cache

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops._device import multiprocessors
from onela.ops.linear import _gated_hopper_kernel as kernel
from onela.ops.linear.joined_hopper import (
    DEPTH,
    GATED,
    LAUNCH_CYCLES,
    REGISTERS,
    choose_tile,
    cycles,
    swizzled,
    tile_cycles,
)
from onela.ops.linear.reference import check_joined

WIDE, NARROW, PIECE = (columns.value for columns in (kernel.WIDE, kernel.NARROW, kernel.PIECE))
ROWS = 128
STAGES = 4
WIDE_STAGE, NARROW_STAGE = 1024, 960
"""Cycles of a stage, as in `cycles`; both products of a narrow tile read the rows."""


@lru_cache(maxsize=1024)
def choose_widths(N: int, size: int, D: int, processors: int) -> tuple[int, int] | None:
    """How many wide and narrow tiles make a row of them, so that the last program is through first.

    None where tiles of one width take no longer (`choose_tile`).

    Args:
        N: rows. size: columns of the result. D: columns of the factors.
    """
    num_m = triton.cdiv(N, ROWS)
    costs = tile_cycles(D, WIDE_STAGE), tile_cycles(D, NARROW_STAGE)

    def longest(widths: tuple[int, int]) -> int:
        """Of the programs, each of which takes every so-many-th tile, wide ones first."""
        wide, tiles = num_m * widths[0], num_m * sum(widths)
        mine = [
            (len(range(p, wide, processors)), len(range(p, tiles, processors))) for p in range(processors)
        ]
        return max(first * costs[0] + (both - first) * costs[1] for first, both in mine) + LAUNCH_CYCLES

    wides = range(triton.cdiv(size, WIDE) + 1)
    found = min(((w, max(0, triton.cdiv(size - w * WIDE, NARROW))) for w in wides), key=longest)
    tile = choose_tile(GATED, N, size, D, processors)
    return found if longest(found) < cycles(GATED, N, size, D, processors, tile) else None


def gated_linear_hopper(
    x: Tensor,
    weight: Tensor,
    widths: tuple[int, int],
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`linear_swiglu_hopper` in so many wide and narrow tiles a row; together they have all columns.

    Args, Returns, Aliasing, Numerics, Raises: as in `linear_swiglu_hopper`.
    """
    check_joined(x, weight, squares)
    N, D = x.shape
    size = weight.shape[0] // 2
    o = x.new_empty(N, size)
    if N == 0 or size == 0:
        return o
    num_m = triton.cdiv(N, ROWS)
    programs = min(multiprocessors(x.device), num_m * sum(widths))
    kernel.gated_product_hopper_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH], swizzled(DEPTH)),
        TensorDescriptor.from_tensor(weight, [WIDE, DEPTH], swizzled(DEPTH)),
        TensorDescriptor.from_tensor(weight, [PIECE, DEPTH], swizzled(DEPTH)),
        TensorDescriptor.from_tensor(o, [64, WIDE], swizzled(WIDE)),
        TensorDescriptor.from_tensor(o, [64, PIECE], swizzled(PIECE)),
        x if squares is None else squares, num_m, *widths, triton.cdiv(D, DEPTH), size, N, float(D), eps,
        STAGES=STAGES, PARTS=0 if squares is None else squares.shape[0], REGISTERS=REGISTERS, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return o
