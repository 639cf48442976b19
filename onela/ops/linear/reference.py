"""Linear maps in 8 bits: rows and weights rounded to float8 under one scale a row, by definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_shape

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def quantize_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round every row to float8 under a scale of its own: `x ~ values * scales`, `scales = max|row| / 448`.

    Args:
        x: [N, D] bf16, fp16 or fp32.
    Returns:
        values: [N, D] float8_e4m3fn, contiguous.
        scales: [N, 1] fp32; 1 for a row of zeros.

    Numerics: in fp32, to nearest even; deterministic. A row that holds NaN or infinity comes out as NaN.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, None)
    wide = x.to(torch.float32)
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(len(x), 1)
    scales = torch.where(largest > 0, largest / FLOAT8_MAX, torch.where(largest == 0, 1.0, torch.nan))
    return (wide / scales).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scales


def float8_linear_ref(x: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`F.linear` with rows of x and of the weight rounded to float8: `(values_x @ weight^T) * scales_x * scales_w`.

    Args:
        x: [N, D] bf16 or fp32. weight: [size, D] float8_e4m3fn and weight_scales: [size, 1] fp32, of `quantize_rows`.
    Returns:
        [N, size] in x's dtype.

    Numerics: products of float8 numbers are exact in fp32; sums in fp32.
    Raises: ShapeError, DtypeError.
    """
    check_weight(x, weight, weight_scales)
    values, scales = quantize_rows_ref(x)
    product = F.linear(values.to(torch.float32), weight.to(torch.float32))
    return (product * scales * weight_scales.t()).to(x.dtype)


def check_weight(x: Tensor, weight: Tensor, weight_scales: Tensor) -> None:
    """Raise `ShapeError` or `DtypeError` unless the weight fits the rows."""
    if weight.dtype != FLOAT8:
        raise DtypeError(f"weight: expected {FLOAT8}, got {weight.dtype}")
    check_float("x", x, None, weight.shape[1])
    check_shape("weight_scales", weight_scales, weight.shape[0], 1)
