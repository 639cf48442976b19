"""Gate, up and their product on Hopper: what the kernel takes, and its launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops._checks import check_float
from onela.ops.gated_delta._launch import multiprocessors
from onela.ops.linear._swiglu_hopper_kernel import linear_swiglu_hopper_kernel

BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4
GROUP_M = 16
"""Rows of tiles that run beside each other."""
SKEW = 2
"""Steps by which the second warpgroup begins later than the first."""
MIN_ROWS = 1024
"""Fewer rows do not fill the device with tiles of this size."""
HALVES = (torch.bfloat16, torch.float16)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these: on Hopper, 16-bit, rows enough, sizes and addresses in multiples of 16 bytes."""
    return (
        x.is_cuda
        and x.dtype in HALVES
        and weight.dtype == x.dtype
        and x.dim() == 2
        and x.shape[0] >= MIN_ROWS
        and x.shape[1] % 8 == 0
        and weight.shape[0] % 16 == 0
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
    )


def linear_swiglu_hopper(x: Tensor, weight: Tensor, *, group_m: int = GROUP_M, skew: int = SKEW) -> Tensor:
    """`linear_swiglu_ref` for Hopper, where `supports` says so.

    Args, Returns, Raises: as in `linear_swiglu_ref`.
    Layout: rows of x and weight may be strided.
    Numerics: fp32 sums, and the product is made of them and rounded once; deterministic.
    """
    N, K = x.shape
    D = weight.shape[0] // 2
    check_float("weight", weight, 2 * D, K)
    o = torch.empty(N, D, dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half = BLOCK_N // 2
    x_desc = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K], layout)
    w_desc = TensorDescriptor.from_tensor(weight, [half, BLOCK_K], layout)
    o_desc = TensorDescriptor.from_tensor(o, [BLOCK_M // 2, half], layout)
    num_m, num_n, num_k = triton.cdiv(N, BLOCK_M), triton.cdiv(D, half), triton.cdiv(K, BLOCK_K)
    linear_swiglu_hopper_kernel[(min(multiprocessors(x.device), num_m * num_n),)](
        x_desc, w_desc, o_desc, num_m, num_n, num_k, D,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, GROUP_M=group_m,
        SKEW=min(skew, num_k - 1, STAGES - 1), num_warps=4,
    )  # fmt: skip
    return o
