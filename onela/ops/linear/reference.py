"""Linear maps in 8 bits: rows and weights rounded to float8 under one scale a row, by definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_shape
from onela.ops.norm import rms_norm_ref, swiglu_ref

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


def rms_norm_float8_ref(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of `rms_norm_ref`, rounded as by `quantize_rows_ref`.

    Args: as in `rms_norm_ref`; x has two axes.
    Returns: as in `quantize_rows_ref`.

    Writes: residual, when given.
    Numerics: the norm is rounded to x's dtype first, then to float8; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, weight.shape[0])
    return quantize_rows_ref(rms_norm_ref(x, weight, eps=eps, zero_centered=zero_centered, residual=residual))


def swiglu_float8_ref(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `swiglu_ref`, rounded as by `quantize_rows_ref`.

    Args:
        gate_up: [N, 2*D].
    Returns: as in `quantize_rows_ref`, of [N, D].

    Numerics: the product is rounded to gate_up's dtype first, then to float8; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_float("gate_up", gate_up, None, None)
    return quantize_rows_ref(swiglu_ref(gate_up))


def linear_swiglu_ref(x: Tensor, weight: Tensor) -> Tensor:
    """The MLP's gated product of two linear maps of one input: `silu(x @ gate^T) * (x @ up^T)`.

    Args:
        x: [N, K]. weight: [2*D, K], gate's rows first, in x's dtype.
    Returns:
        [N, D] in x's dtype.

    Numerics: both maps are rounded to x's dtype first, and so is the SiLU; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, None)
    check_float("weight", weight, None, x.shape[1])
    return swiglu_ref(F.linear(x, weight))


def float8_linear_ref(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """A linear map over rows and a weight in float8: `(x @ weight^T) * x_scales * weight_scales`.

    Args:
        x: [N, D] float8_e4m3fn and x_scales: [N, 1] fp32, of `quantize_rows` or what ends in it.
        weight: [size, D] float8_e4m3fn and weight_scales: [size, 1] fp32, the same of a weight.
        out_dtype: of the result.
    Returns:
        [N, size] in out_dtype.

    Numerics: products of float8 numbers are exact in fp32; sums in fp32.
    Raises: ShapeError, DtypeError.
    """
    check_factors(x, x_scales, weight, weight_scales)
    product = F.linear(x.to(torch.float32), weight.to(torch.float32))
    return (product * x_scales * weight_scales.t()).to(out_dtype)


def check_factors(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> None:
    """Raise `ShapeError` or `DtypeError` unless rows and weight are float8 and fit each other."""
    for name, values in (("x", x), ("weight", weight)):
        if values.dtype != FLOAT8:
            raise DtypeError(f"{name}: expected {FLOAT8}, got {values.dtype}")
    check_shape("x", x, None, weight.shape[1])
    check_shape("x_scales", x_scales, x.shape[0], 1)
    check_shape("weight_scales", weight_scales, weight.shape[0], 1)
