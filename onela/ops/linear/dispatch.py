"""Which implementation of a linear map runs: what the GPU has for it, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.linear.float8_reference import (
    BLOCK,
    added_linear_float8_ref,
    float8_linear_swiglu_ref,
    float8_normed_linear_ref,
)
from onela.ops.linear.reference import (
    FLOAT8,
    added_linear_ref,
    check_heads,
    cut_heads,
    float8_linear_ref,
    normed_linear_ref,
    quantize_rows_ref,
    rms_norm_float8_ref,
    swiglu_float8_ref,
)
from onela.ops.norm import qk_norm_rotary, swiglu

HALVES = (torch.bfloat16, torch.float16)
MAX_ROW = 32768
JOINED_ROWS = 128
"""Fewer rows do not fill a tile."""
ADDED_ROWS, LONG_SUM = 512, 4096
"""Of fewer rows and over more columns torch's own product divides the sums, and is faster with the norm behind it."""
HEADS_ROWS = 1024
"""With more rows larger tiles, and a launch for norms and rotations, are as fast."""
WIDTHS_ROWS = 2048
"""With more rows the last round of tiles is a small part of all."""
FLOAT8_ADDED_ROWS = 1024
"""Of more rows a launch rounds a norm faster than products take its blocks' scales."""
FLOAT8_ROWS = 2048
"""Of more rows torch's scaled product is as fast as our own."""
ALIGNMENT = 16
"""The scaled product wants rows and columns in multiples of this."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows_ref`, by its kernel on a GPU that knows float8. Same arguments, results and errors."""
    if _has_kernels(x):
        from onela.ops.linear.kernels import quantize_rows_triton

        return quantize_rows_triton(x)
    return quantize_rows_ref(x)


def rms_norm_float8(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm_float8_ref`, by its kernel on a GPU that knows float8. Same arguments, results and errors."""
    if _has_kernels(x) and (residual is None or residual.stride(-1) == 1):
        from onela.ops.linear.kernels import rms_norm_float8_triton

        return rms_norm_float8_triton(x, weight, eps=eps, zero_centered=zero_centered, residual=residual)
    return rms_norm_float8_ref(x, weight, eps=eps, zero_centered=zero_centered, residual=residual)


def swiglu_float8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_float8_ref`, by its kernel on a GPU that knows float8. Same arguments, results and errors."""
    if _has_kernels(gate_up):
        from onela.ops.linear.kernels import swiglu_float8_triton

        return swiglu_float8_triton(gate_up)
    return swiglu_float8_ref(gate_up)


def normed_linear(x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`normed_linear_ref`, by its kernel where `has_joined` says so. Same arguments, results and errors."""
    if squares is not None and has_joined(x, weight):
        from onela.ops.linear.joined_hopper import normed_linear_hopper

        return normed_linear_hopper(x, weight, squares=squares, eps=eps)
    return normed_linear_ref(x, weight, squares=squares, eps=eps)


def linear_swiglu(x: Tensor, weight: Tensor, *, squares: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`linear_swiglu_ref`: on Hopper in one launch where there are rows enough, else by torch's matrix product.

    Args, Returns, Raises: as in `linear_swiglu_ref`.
    Numerics: as in the implementation that runs.
    """
    if has_joined(x, weight) and weight.shape[0] % 16 == 0:
        from onela.ops.linear.gated_hopper import choose_widths, gated_linear_hopper
        from onela.ops.linear.joined_hopper import linear_swiglu_hopper

        N, D = x.shape
        widths = (
            choose_widths(N, weight.shape[0] // 2, D, multiprocessors(x.device)) if N <= WIDTHS_ROWS else None
        )
        if widths is not None:
            return gated_linear_hopper(x, weight, widths, squares=squares, eps=eps)
        return linear_swiglu_hopper(x, weight, squares=squares, eps=eps)
    return swiglu(normed_linear_ref(x, weight, squares=squares, eps=eps))


def added_linear(
    x: Tensor, weight: Tensor, *, residual: Tensor, norm_weight: Tensor, zero_centered: bool = True
) -> tuple[Tensor, Tensor]:
    """`added_linear_ref`, by its kernel where `has_added` says so and the residual is fp32.

    Args, Returns, Writes, Raises: as in `added_linear_ref`.
    Numerics: as in the implementation that runs.
    """
    if has_added(x, weight) and residual.dtype == torch.float32 and residual.stride(-1) == 1:
        from onela.ops.linear.joined_hopper import added_linear_hopper

        return added_linear_hopper(
            x, weight, residual=residual, norm_weight=norm_weight, zero_centered=zero_centered
        )
    return added_linear_ref(
        x, weight, residual=residual, norm_weight=norm_weight, zero_centered=zero_centered
    )


def heads_linear(
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
    """`heads_linear_ref`: in one launch where `has_heads` says so, else as a product and what follows it.

    Args, Returns, Raises: as in `heads_linear_ref`.
    Numerics: as in the implementations that run.
    """
    if has_heads(x, weight, q_weight, cos):
        from onela.ops.linear.joined_hopper import heads_linear_hopper

        return heads_linear_hopper(
            x,
            weight,
            q_weight=q_weight,
            k_weight=k_weight,
            cos=cos,
            sin=sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            eps=eps,
            zero_centered=zero_centered,
            squares=squares,
            squares_eps=squares_eps,
        )
    gated = check_heads(x, weight, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, squares)
    rows = normed_linear(x, weight, squares=squares, eps=squares_eps)
    q, k, v, gate = cut_heads(rows, q_weight.shape[0], num_heads, num_kv_heads, gated)
    q, k = qk_norm_rotary(
        q,
        k,
        q_weight=q_weight,
        k_weight=k_weight,
        cos=cos,
        sin=sin,
        eps=eps,
        zero_centered=zero_centered,
        # Beside their gates heads would lie apart.
        in_place=not gated,
    )
    return q, k, v, gate


def has_heads(x: Tensor, weight: Tensor, q_weight: Tensor, cos: Tensor) -> bool:
    """Whether `heads_linear` has a kernel for these that is worth its while."""
    D, half = q_weight.shape[0], cos.shape[1]
    return (
        x.shape[0] <= HEADS_ROWS
        and D in (64, 128, 256)
        and half > 0
        and D in (2 * half, 4 * half, 8 * half)
        and cos.is_contiguous()
        and has_joined(x, weight)
    )


def has_joined(x: Tensor, weight: Tensor) -> bool:
    """Whether Hopper's joined products take these: 16-bit, enough rows, and each begins where the copy engine can."""
    return (
        has_wgmma(x.device)
        and x.dim() == 2
        and x.dtype in HALVES
        and weight.dtype == x.dtype
        and x.shape[0] >= JOINED_ROWS
        and x.shape[1] % 8 == 0
        and all(t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
        and weight.shape[0] % 8 == 0
    )


def has_added(x: Tensor, weight: Tensor) -> bool:
    """Whether `added_linear` has a kernel for these that is worth its while."""
    worth = x.shape[0] >= ADDED_ROWS or x.shape[-1] <= LONG_SUM
    return worth and weight.shape[0] % 64 == 0 and has_joined(x, weight)


def float8_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """`float8_linear_ref`, by the tensor cores where they take it. Same arguments, results and errors.

    On Hopper up to 2,048 rows are multiplied by our own kernel, others by torch's. Elsewhere (a CPU, fp32 results,
    sizes that are no multiples of 16) the reference gives the same numbers, slower than bf16 would be.
    """
    N = x.shape[0]
    if (
        N <= FLOAT8_ROWS
        and out_dtype == torch.bfloat16
        and x.is_contiguous()
        and has_float8_joined(N, weight)
    ):
        return float8_normed_linear(x, x_scales.t(), weight, weight_scales, out_dtype=out_dtype)
    aligned = not weight.shape[0] % ALIGNMENT and not weight.shape[1] % ALIGNMENT
    if _has_float8(x) and out_dtype == torch.bfloat16 and x.shape[0] and aligned:
        from onela.ops.linear.kernels import float8_linear_scaled

        return float8_linear_scaled(x, x_scales, weight, weight_scales, out_dtype=out_dtype)
    return float8_linear_ref(x, x_scales, weight, weight_scales, out_dtype=out_dtype)


def float8_normed_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype,
) -> Tensor:
    """`float8_normed_linear_ref`, by its kernel where `has_float8_joined` says so and the result is bf16.

    Args, Returns, Raises: as in `float8_normed_linear_ref`.
    Numerics: as in the implementation that runs.
    """
    if has_float8_joined(x.shape[0], weight) and x.is_contiguous() and out_dtype == torch.bfloat16:
        from onela.ops.linear.float8_hopper import float8_normed_linear_hopper

        return float8_normed_linear_hopper(
            x, x_scales, weight, weight_scales, squares=squares, eps=eps, out_dtype=out_dtype
        )
    return float8_normed_linear_ref(
        x, x_scales, weight, weight_scales, squares=squares, eps=eps, out_dtype=out_dtype
    )


def float8_linear_swiglu(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`float8_linear_swiglu_ref`, by its kernel where `has_float8_joined` says so.

    Args, Returns, Raises: as in `float8_linear_swiglu_ref`.
    Numerics: as in the implementation that runs.
    """
    if has_float8_joined(x.shape[0], weight) and x.is_contiguous() and weight.shape[0] % 32 == 0:
        from onela.ops.linear.float8_hopper import float8_linear_swiglu_hopper

        return float8_linear_swiglu_hopper(x, x_scales, weight, weight_scales, squares=squares, eps=eps)
    return float8_linear_swiglu_ref(x, x_scales, weight, weight_scales, squares=squares, eps=eps)


def added_linear_float8(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    zero_centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`added_linear_float8_ref`, by its kernel where `has_float8_added` says so and the residual is fp32.

    Args, Returns, Writes, Raises: as in `added_linear_float8_ref`.
    Numerics: as in the implementation that runs.
    """
    run = added_linear_float8_ref
    if has_float8_added(x, weight) and residual.dtype == torch.float32 and residual.stride(-1) == 1:
        from onela.ops.linear.float8_hopper import added_linear_float8_hopper

        run = added_linear_float8_hopper
    return run(
        *(x, x_scales, weight, weight_scales),
        residual=residual,
        norm_weight=norm_weight,
        zero_centered=zero_centered,
    )


def has_float8_joined(rows: int, weight: Tensor) -> bool:
    """Whether Hopper's float8 products take so many rows and this weight. Their rows are contiguous."""
    return (
        has_wgmma(weight.device)
        and weight.dtype == FLOAT8
        and rows >= JOINED_ROWS
        and weight.is_contiguous()
        and weight.shape[1] % ALIGNMENT == 0
        and weight.shape[0] % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def has_float8_added(x: Tensor, weight: Tensor) -> bool:
    """Whether `added_linear_float8` has a kernel for these, of 8 bits or of 16, that is worth its while."""
    if weight.shape[0] % BLOCK or x.shape[0] > FLOAT8_ADDED_ROWS:
        return False
    if x.dtype == FLOAT8:
        return x.is_contiguous() and has_float8_joined(x.shape[0], weight)
    return has_added(x, weight)


def _has_float8(x: Tensor) -> bool:
    """Whether x lies on a GPU whose tensor cores take float8."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _has_kernels(x: Tensor) -> bool:
    """Whether the kernels take these rows: on such a GPU, two axes, the last one contiguous and not too long."""
    return _has_float8(x) and x.dim() == 2 and x.stride(-1) == 1 and x.shape[1] <= MAX_ROW
