# mypy: disable-error-code="no-untyped-def"
"""Linear maps in 8 bits on a GPU: rows are rounded where they are made, then torch's own scaled matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float
from onela.ops.linear.dispatch import MAX_ROW
from onela.ops.linear.reference import FLOAT8, FLOAT8_MAX, check_factors


@triton.jit
def _store_rounded(b_x, p_o, p_scales, i_n, o_d, mask, D, LARGEST: tl.constexpr):
    """Round one row of fp32 numbers, zero past its end, and keep it with its scale."""
    largest = tl.max(tl.abs(b_x), 0)
    # NaN is lost in a maximum, and is below no bound.
    bounded = tl.min((tl.abs(b_x) <= 3.4028234e38).to(tl.int32), 0)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    scale = tl.where(bounded > 0, scale, float("nan"))
    b_q = tl.minimum(tl.maximum(b_x / scale, -LARGEST), LARGEST)
    tl.store(p_o + i_n * D + o_d, b_q.to(p_o.dtype.element_ty), mask=mask)
    tl.store(p_scales + i_n, scale)


@triton.jit
def quantize_rows_kernel(p_x, p_o, p_scales, D, s_x, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    mask = o_d < D
    b_x = tl.load(p_x + i_n * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    _store_rounded(b_x, p_o, p_scales, i_n, o_d, mask, D, LARGEST)


@triton.jit
def rms_norm_float8_kernel(
    p_x, p_residual, p_weight, p_o, p_scales, D, s_x, s_r, eps,
    LARGEST: tl.constexpr, BLOCK_D: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    mask = o_d < D
    dtype = p_x.dtype.element_ty
    b_x = tl.load(p_x + i_n * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(p_weight + o_d, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        p_sum = p_residual + i_n * s_r + o_d
        b_sum = (b_x + tl.load(p_sum, mask=mask, other=0.0).to(tl.float32)).to(p_residual.dtype.element_ty)
        tl.store(p_sum, b_sum, mask=mask)
        b_x = b_sum.to(tl.float32)
    b_n = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    if CENTERED:
        b_n = b_n * (1.0 + b_w)
    else:
        b_n = b_n.to(dtype).to(tl.float32) * b_w
    _store_rounded(b_n.to(dtype).to(tl.float32), p_o, p_scales, i_n, o_d, mask, D, LARGEST)


@triton.jit
def swiglu_float8_kernel(p_x, p_o, p_scales, D, s_x, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    mask = o_d < D
    dtype = p_x.dtype.element_ty
    b_gate = tl.load(p_x + i_n * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + i_n * s_x + D + o_d, mask=mask, other=0.0).to(tl.float32)
    b_gate = (b_gate / (1.0 + tl.exp(-b_gate))).to(dtype).to(tl.float32)
    _store_rounded((b_gate * b_up).to(dtype).to(tl.float32), p_o, p_scales, i_n, o_d, mask, D, LARGEST)


def quantize_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows_ref` in one launch.

    Args, Returns, Numerics: as in `quantize_rows_ref`.
    Layout: the last axis of x is contiguous.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, None)
    values, scales = _rows_like(x, x.shape[1])
    if x.shape[0]:
        quantize_rows_kernel[(x.shape[0],)](x, values, scales, x.shape[1], x.stride(0), **_cut(x.shape[1]))
    return values, scales


def rms_norm_float8_triton(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm_float8_ref` in one launch.

    Args, Returns, Writes, Numerics: as in `rms_norm_float8_ref`.
    Layout: the last axis of x and residual is contiguous.
    Raises: ShapeError, DtypeError.
    """
    check_float("x", x, None, weight.shape[0])
    added = x if residual is None else residual
    check_float("residual", added, *x.shape)
    values, scales = _rows_like(x, x.shape[1])
    if x.shape[0]:
        rms_norm_float8_kernel[(x.shape[0],)](
            x, added, weight, values, scales, x.shape[1], x.stride(0), added.stride(0), eps,
            CENTERED=zero_centered, RESIDUAL=residual is not None, **_cut(x.shape[1]),
        )  # fmt: skip
    return values, scales


def swiglu_float8_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_float8_ref` in one launch.

    Args, Returns, Numerics: as in `swiglu_float8_ref`.
    Layout: the last axis of gate_up is contiguous.
    Raises: ShapeError, DtypeError.
    """
    check_float("gate_up", gate_up, None, None)
    N, D = gate_up.shape[0], gate_up.shape[1] // 2
    values, scales = _rows_like(gate_up, D)
    if N:
        swiglu_float8_kernel[(N,)](gate_up, values, scales, D, gate_up.stride(0), **_cut(D))
    return values, scales


def _rows_like(x: Tensor, D: int) -> tuple[Tensor, Tensor]:
    if D > MAX_ROW:
        raise ShapeError(f"x: rows of at most {MAX_ROW} numbers, got {D}")
    values = torch.empty(x.shape[0], D, dtype=FLOAT8, device=x.device)
    return values, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def _cut(D: int) -> dict[str, float]:
    """A program holds a whole row, 16 numbers or more in each thread."""
    block = max(16, triton.next_power_of_2(D))
    return {"LARGEST": FLOAT8_MAX, "BLOCK_D": block, "num_warps": min(16, max(1, block // 512))}


def float8_linear_scaled(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """`float8_linear_ref` by `torch._scaled_mm` with a scale per row of both.

    Args, Returns: as in `float8_linear_ref`; D and size are multiples of 16, out_dtype is bf16.
    Numerics: the tensor cores' fast accumulation, about 14 bits of mantissa; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_factors(x, x_scales, weight, weight_scales)
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=weight_scales.t(), out_dtype=out_dtype, use_fast_accum=True
    )
