# mypy: disable-error-code="no-untyped-def"
"""Linear maps in 8 bits on a GPU: one launch that rounds the rows, then torch's own scaled matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float
from onela.ops.linear.reference import FLOAT8, FLOAT8_MAX, check_weight

MAX_ROW = 32768
"""Longest row that a program holds at once."""
ALIGNMENT = 16
"""The scaled product wants rows and columns in multiples of this."""


@triton.jit
def quantize_rows_kernel(p_x, p_o, p_scales, D, s_x, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    mask = o_d < D
    b_x = tl.load(p_x + i_n * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(b_x), 0)
    # NaN is lost in a maximum, and is below no bound.
    bounded = tl.min((tl.abs(b_x) <= 3.4028234e38).to(tl.int32), 0)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    scale = tl.where(bounded > 0, scale, float("nan"))
    b_q = tl.minimum(tl.maximum(b_x / scale, -LARGEST), LARGEST)
    tl.store(p_o + i_n * D + o_d, b_q.to(p_o.dtype.element_ty), mask=mask)
    tl.store(p_scales + i_n, scale)


def quantize_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows_ref` in one launch.

    Args, Returns, Numerics: as in `quantize_rows_ref`.
    Layout: the last axis of x is contiguous.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, None)
    N, D = x.shape
    if D > MAX_ROW:
        raise ShapeError(f"x: rows of at most {MAX_ROW} numbers, got {D}")
    values = torch.empty(N, D, dtype=FLOAT8, device=x.device)
    scales = torch.empty(N, 1, dtype=torch.float32, device=x.device)
    if N:
        block = max(16, triton.next_power_of_2(D))
        quantize_rows_kernel[(N,)](
            x, values, scales, D, x.stride(0),
            LARGEST=FLOAT8_MAX, BLOCK_D=block, num_warps=4 if block <= 4096 else 8,
        )  # fmt: skip
    return values, scales


def float8_linear_scaled(x: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`float8_linear_ref` by `torch._scaled_mm` with a scale per row of both.

    Args, Returns: as in `float8_linear_ref`; D and size are multiples of 16, x is bf16.
    Numerics: the tensor cores' fast accumulation, about 14 bits of mantissa; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_weight(x, weight, weight_scales)
    values, scales = quantize_rows_triton(x)
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scales.t(),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
