"""Float8 products that are joined with their neighbours, by definition. Their rows are rounded in blocks of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._checks import check_float, check_shape
from onela.ops.linear.reference import FLOAT8, FLOAT8_MAX, added_linear_ref, check_joined, check_residual
from onela.ops.norm import swiglu_ref

BLOCK = 128
"""Columns of a row that share a scale."""
SMALLEST = 1e-30
"""Magnitudes below this are rounded as if it were the largest of their block."""


def quantize_blocks_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round every 128 columns of a row to float8 under a scale of their own, `max|block| / 448`.

    Args:
        x: [N, D] bf16, fp16 or fp32.
    Returns:
        values: [N, D] float8_e4m3fn, contiguous.
        scales: [ceil(D / 128), N] fp32.

    Numerics: in fp32, to nearest even; deterministic. A block that holds NaN or infinity comes out as NaN.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, None)
    N, D = x.shape
    blocks = -(-D // BLOCK)
    wide = F.pad(x.to(torch.float32), (0, blocks * BLOCK - D)).view(N, blocks, BLOCK)
    largest = wide.abs().amax(-1)
    scales = torch.where(largest < torch.inf, largest.clamp(min=SMALLEST) / FLOAT8_MAX, torch.nan)
    values = (wide / scales[..., None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).view(N, blocks * BLOCK)[:, :D]
    return values.to(FLOAT8).contiguous(), scales.t().contiguous()


def float8_normed_linear_ref(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype,
) -> Tensor:
    """`normed_linear_ref` over float8: `(x @ weight^T) / sqrt(sum(squares) / K + eps)`.

    Args:
        x: [N, K] float8_e4m3fn. x_scales: [ceil(K / 128), N] fp32, as of `quantize_blocks_ref`, or [1, N], a scale for
            all columns.
        weight: [size, K] float8_e4m3fn. weight_scales: [size, 1] fp32, of `quantize_rows`.
        squares: [parts, N] fp32, of the rows that are normed; None: x is finished. eps: added to the mean square.
        out_dtype: of the result.
    Returns:
        [N, size] in out_dtype.

    Numerics: products of float8 numbers are exact in fp32; sums in fp32, rounded once; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_block_factors(x, x_scales, weight, weight_scales, squares)
    product = F.linear(_wide(x, x_scales), weight.to(torch.float32) * weight_scales)
    if squares is not None:
        product *= torch.rsqrt(squares.sum(0) / x.shape[1] + eps)[:, None]
    return product.to(out_dtype)


def float8_linear_swiglu_ref(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`linear_swiglu_ref` over float8, rounded again: `silu(x @ gate^T) * (x @ up^T)`.

    Args:
        x, x_scales, squares, eps: as in `float8_normed_linear_ref`.
        weight: [2*D, K] float8_e4m3fn, gate's rows first. weight_scales: [2*D, 1] fp32.
    Returns: as in `quantize_blocks_ref`, of [N, D].

    Numerics: as in `float8_normed_linear_ref`; nothing is rounded before the gated product is.
    Raises: ShapeError, DtypeError.
    """
    both = float8_normed_linear_ref(
        x, x_scales, weight, weight_scales, squares=squares, eps=eps, out_dtype=torch.float32
    )
    return quantize_blocks_ref(swiglu_ref(both))


def added_linear_float8_ref(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    zero_centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`added_linear_ref` whose rows are rounded to float8, over float8 or, without scales, over 16 bits.

    Args:
        x, x_scales, weight, weight_scales: as in `float8_normed_linear_ref`; or x: [N, K] and weight: [size, K] in one
            16-bit dtype, and no scales.
        residual, norm_weight, zero_centered: as in `added_linear_ref`; residual is fp32.
    Returns:
        values, scales: as in `quantize_blocks_ref`, of the sum times the norm's weight, [N, size].
        squares: [parts, N] fp32, as in `added_linear_ref`.

    Writes: residual.
    Numerics: fp32 inside; the map is not rounded before it is added; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_added_factors(x, x_scales, weight, weight_scales, residual, norm_weight)
    if x_scales is None or weight_scales is None:
        wide, factors = x.to(torch.float32), weight.to(torch.float32)
    else:
        wide, factors = _wide(x, x_scales), weight.to(torch.float32) * weight_scales
    values, squares = added_linear_ref(
        wide, factors, residual=residual, norm_weight=norm_weight, zero_centered=zero_centered
    )
    return *quantize_blocks_ref(values), squares


def check_block_factors(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, squares: Tensor | None
) -> None:
    """Raise `ShapeError` or `DtypeError` unless rows and weight are float8 and fit each other and their scales."""
    for name, values in (("x", x), ("weight", weight)):
        if values.dtype != FLOAT8:
            raise DtypeError(f"{name}: expected {FLOAT8}, got {values.dtype}")
    check_shape("x", x, None, weight.shape[1])
    check_shape("weight_scales", weight_scales, weight.shape[0], 1)
    check_shape("x_scales", x_scales, None, x.shape[0])
    blocks = -(-x.shape[1] // BLOCK)
    if x_scales.shape[0] not in (1, blocks):
        raise ShapeError(
            f"x_scales: expected 1 or {blocks} rows for {x.shape[1]} columns, got {x_scales.shape[0]}"
        )
    if squares is not None:
        check_float("squares", squares, None, x.shape[0])


def check_added_factors(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
) -> None:
    """Raise `ShapeError` or `DtypeError` unless a product's factors fit each other, the residual and its next norm.

    The factors are float8 with their scales, or have 16 bits and none.
    """
    if x_scales is None or weight_scales is None:
        check_joined(x, weight, None)
    else:
        check_block_factors(x, x_scales, weight, weight_scales, None)
    check_residual(x, weight, residual, norm_weight)


def _wide(x: Tensor, x_scales: Tensor) -> Tensor:
    """Rows in fp32, under their scales."""
    scales = x_scales.repeat_interleave(BLOCK if len(x_scales) > 1 else x.shape[1], 0).t()
    return x.to(torch.float32) * scales[:, : x.shape[1]]
