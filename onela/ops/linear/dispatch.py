"""Which implementation of a linear map in 8 bits runs: torch's scaled product if the GPU has it, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops.linear.reference import float8_linear_ref, quantize_rows_ref


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows_ref`, by its kernel on a GPU that knows float8. Same arguments, results and errors."""
    if has_float8(x):
        from onela.ops.linear.kernels import MAX_ROW, quantize_rows_triton

        if x.shape[1] <= MAX_ROW:
            return quantize_rows_triton(x)
    return quantize_rows_ref(x)


def float8_linear(x: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`float8_linear_ref`, by the tensor cores where they take it. Same arguments, results and errors.

    Elsewhere (a CPU, fp32 rows, sizes that are no multiples of 16) the reference gives the same numbers, slower than
    bf16 would be.
    """
    if has_float8(x) and x.dtype == torch.bfloat16 and x.shape[0]:
        from onela.ops.linear.kernels import ALIGNMENT, MAX_ROW, float8_linear_scaled

        if not weight.shape[0] % ALIGNMENT and not weight.shape[1] % ALIGNMENT and x.shape[1] <= MAX_ROW:
            return float8_linear_scaled(x, weight, weight_scales)
    return float8_linear_ref(x, weight, weight_scales)


def has_float8(x: Tensor) -> bool:
    """Whether x lies on a GPU whose tensor cores take float8, its last axis contiguous."""
    return (
        x.is_cuda
        and x.dim() == 2
        and x.stride(-1) == 1
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )
