# mypy: disable-error-code="no-untyped-def"
"""Copies of whole rows between two tensors, or inside one, by two indices."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_shape


@triton.jit
def copy_rows_kernel(
    p_target, p_target_rows, p_source, p_source_rows, p_parts, row_size, part_size,
    HAS_TARGET: tl.constexpr, HAS_SOURCE: tl.constexpr, HAS_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    i_target = i_n
    i_source = i_n
    if HAS_TARGET:
        i_target = tl.load(p_target_rows + i_n).to(tl.int64)
    if HAS_SOURCE:
        i_source = tl.load(p_source_rows + i_n).to(tl.int64)
    if i_target < 0:
        return
    if i_source < 0:
        return
    size = row_size
    if HAS_PARTS:
        size = tl.minimum(tl.load(p_parts + i_n).to(tl.int32) * part_size, row_size)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_source + i_source * row_size + o_x, mask=o_x < size, other=0)
    tl.store(p_target + i_target * row_size + o_x, b_x, mask=o_x < size)


def copy_rows_triton(
    target: Tensor,
    target_rows: Tensor | None,
    source: Tensor,
    source_rows: Tensor | None,
    parts: Tensor | None,
) -> None:
    """`onela.ops.indexing.copy_rows` in one launch. Raises ShapeError, DtypeError."""
    check_shape("source", source, None, *target.shape[1:])
    if source.dtype != target.dtype:
        raise DtypeError(f"source: expected {target.dtype}, got {source.dtype}")
    given = target_rows if target_rows is not None else source_rows
    assert given is not None
    row_size = target[0].numel() if target.shape[0] else 0
    N = given.shape[0]
    if N == 0 or row_size == 0:
        return
    block = min(8192, max(32, triton.next_power_of_2(row_size)))
    copy_rows_kernel[(N, triton.cdiv(row_size, block))](
        *(target, target_rows, source, source_rows, parts),
        row_size,
        row_size // target.shape[1] if parts is not None else 1,
        HAS_TARGET=target_rows is not None,
        HAS_SOURCE=source_rows is not None,
        HAS_PARTS=parts is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 1024)),
    )
