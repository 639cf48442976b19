"""Linear maps that are joined with their neighbours, and those in 8 bits under one scale a row, by definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._checks import check_float, check_shape
from onela.ops._dtypes import compute_dtype
from onela.ops.norm import qk_norm_rotary_ref, rms_norm_ref, swiglu_ref

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


def normed_linear_ref(
    x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """A linear map of rows whose norm is not finished: `(x @ weight^T) / sqrt(sum(squares) / K + eps)`.

    A root-mean-square norm is a weight per column and a factor per row. The factor may as well come after the product
    that reads the rows; then whoever makes a row need not have seen all of it.

    Args:
        x: [N, K], under the norm's weight. weight: [size, K], in x's dtype.
        squares: [parts, N] fp32, the sums of squares of the pieces of each row that is normed; None: x is finished.
        eps: added to the mean square.
    Returns:
        [N, size] in x's dtype.

    Numerics: with squares fp32 inside (fp64 for fp64), rounded once; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_joined(x, weight, squares)
    if squares is None:
        return F.linear(x, weight)
    dtype = compute_dtype(x)
    factor = torch.rsqrt(squares.sum(0).to(dtype) / x.shape[1] + eps)[:, None]
    return (F.linear(x.to(dtype), weight.to(dtype)) * factor).to(x.dtype)


def linear_swiglu_ref(
    x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The MLP's gated product of two linear maps of one input: `silu(x @ gate^T) * (x @ up^T)`.

    Args:
        x: [N, K]. weight: [2*D, K], gate's rows first, in x's dtype.
        squares, eps: as in `normed_linear_ref`.
    Returns:
        [N, D] in x's dtype.

    Numerics: both maps are rounded to x's dtype first, and so is the SiLU; deterministic.
    Raises: ShapeError, DtypeError.
    """
    return swiglu_ref(normed_linear_ref(x, weight, squares=squares, eps=eps))


def added_linear_ref(
    x: Tensor, weight: Tensor, *, residual: Tensor, norm_weight: Tensor, zero_centered: bool = True
) -> tuple[Tensor, Tensor]:
    """Add a linear map to a residual, `residual += x @ weight^T`, and begin the norm of the sum.

    Args:
        x: [N, K]. weight: [size, K], in x's dtype.
        residual: [N, size], in x's dtype or a wider one.
        norm_weight: [size], of the norm that reads the sum. zero_centered: as in `rms_norm_ref`.
    Returns:
        values: [N, size] in x's dtype, the sum times the norm's weight.
        squares: [parts, N] fp32, sums of squares of pieces of the sum's rows; both for `normed_linear` or
            `linear_swiglu`.

    Writes: residual.
    Numerics: fp32 inside (fp64 for fp64); the map is not rounded before it is added; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_added(x, weight, residual, norm_weight)
    dtype = compute_dtype(x)
    wide = residual.to(dtype) + F.linear(x.to(dtype), weight.to(dtype))
    residual.copy_(wide)
    values = wide * (norm_weight.to(dtype) + (1.0 if zero_centered else 0.0))
    return values.to(x.dtype), wide.square().sum(-1)[None]


def heads_linear_ref(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What attention reads: a linear map to queries, keys and values, then norms and rotations of queries and keys.

    Args:
        x: [N, K]. weight: [size, K], in x's dtype: rows of the queries' heads, of the keys' and of the values'. It may
            have as many rows more as queries have: then each query head's are followed by those of its gate.
        q_weight, k_weight: [D], of the norms. cos, sin: [N, R/2] fp32.
        num_heads, num_kv_heads: HQ and HKV.
        eps, zero_centered: as in `rms_norm_ref`, of queries and keys.
        squares, squares_eps: as `squares` and `eps` in `normed_linear_ref`, of x.
    Returns:
        q: [N, HQ, D]. k, v: [N, HKV, D]. gate: [N, HQ, D], or None. All in x's dtype; a gate's heads may lie apart.

    Numerics: as in `normed_linear_ref`, then as in `qk_norm_rotary_ref`.
    Raises: ShapeError, DtypeError.
    """
    gated = check_heads(x, weight, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, squares)
    o = normed_linear_ref(x, weight, squares=squares, eps=squares_eps)
    q, k, v, gate = cut_heads(o, q_weight.shape[0], num_heads, num_kv_heads, gated)
    q, k = qk_norm_rotary_ref(
        q, k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, eps=eps, zero_centered=zero_centered
    )
    return q, k, v, gate


def check_heads(
    x: Tensor,
    weight: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    squares: Tensor | None,
) -> bool:
    """Whether queries have gates. Raises `ShapeError` or `DtypeError` unless all fit each other."""
    check_joined(x, weight, squares)
    check_float("q_weight", q_weight, None)
    D = q_weight.shape[0]
    check_float("k_weight", k_weight, D)
    check_float("cos", cos, x.shape[0], None)
    check_float("sin", sin, *cos.shape)
    plain = (num_heads + 2 * num_kv_heads) * D
    gates = weight.shape[0] - plain
    if gates not in (0, num_heads * D):
        raise ShapeError(
            f"weight: expected {plain} rows for {num_heads} query and {num_kv_heads} key heads of {D}, or "
            f"{plain + num_heads * D} with gates, got {weight.shape[0]}"
        )
    return gates > 0


def cut_heads(
    rows: Tensor, head_dim: int, num_heads: int, num_kv_heads: int, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and gates of a map's rows [N, size], as its weight has them; views."""
    heads = rows.view(len(rows), rows.shape[1] // head_dim, head_dim)
    first = num_heads * (1 + gated)
    q, gate = (heads[:, :first:2], heads[:, 1:first:2]) if gated else (heads[:, :first], None)
    return q, heads[:, first : first + num_kv_heads], heads[:, first + num_kv_heads :], gate


def check_joined(x: Tensor, weight: Tensor, squares: Tensor | None) -> None:
    """Raise `ShapeError` or `DtypeError` unless rows, weight and sums of squares fit each other."""
    check_float("x", x, None, None)
    check_float("weight", weight, None, x.shape[1])
    if squares is not None:
        check_float("squares", squares, None, x.shape[0])


def check_added(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor) -> None:
    """Raise `ShapeError` or `DtypeError` unless a product's factors fit each other, the residual and its next norm."""
    check_joined(x, weight, None)
    check_residual(x, weight, residual, norm_weight)


def check_residual(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor) -> None:
    """Raise `ShapeError` or `DtypeError` unless the residual and its next norm fit the product that is added."""
    check_float("residual", residual, x.shape[0], weight.shape[0])
    check_float("norm_weight", norm_weight, weight.shape[0])


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
