"""Which implementation of the convolution's step runs: the kernel for tensors on a GPU, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops.short_conv.reference import short_conv_step_ref


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    *,
    conv_state: Tensor,
    records_x: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    round_sum: bool = False,
) -> Tensor:
    """`short_conv_step_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    step = {
        "conv_state": conv_state,
        "records_x": records_x,
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    if x.is_cuda and x.dtype != torch.float64:
        from onela.ops.short_conv.kernels import short_conv_step_triton

        return short_conv_step_triton(x, weight, **step, round_sum=round_sum)
    return short_conv_step_ref(x, weight, **step, round_sum=round_sum)
