# mypy: disable-error-code="no-untyped-def"
"""The gates alone, in one launch: for the steps that do not fuse them with the convolution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.ops._checks import check_float
from onela.ops.gated_delta._checks import check_layout
from onela.ops.gated_delta._conv_gates_kernel import write_gates


@triton.jit
def gates_kernel(
    p_a, p_b, p_A_log, p_dt_bias, p_g, p_beta, num_rows, s_a, s_b,
    HV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HV: tl.constexpr,
):  # fmt: skip
    i_rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    write_gates(
        p_a, p_b, p_A_log, p_dt_bias, p_g, p_beta, i_rows, i_rows < num_rows, s_a, s_b, HV, BLOCK_HV
    )  # fmt: skip


def gated_delta_gates_triton(
    a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, round_beta: bool = False
) -> tuple[Tensor, Tensor]:
    """`gated_delta_gates` in one launch. Args: a, b: [N, HV], rows may be strided. Returns: g, beta: [N, HV] fp32."""
    N, HV = a.shape
    check_float("b", b, N, HV)
    check_float("A_log", A_log, HV)
    check_float("dt_bias", dt_bias, HV)
    for name, tensor in {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}.items():
        check_layout(name, tensor)
    g = torch.empty(N, HV, dtype=torch.float32, device=a.device)
    # What is written is rounded to the dtype that it is written in.
    beta = torch.empty_like(g, dtype=b.dtype if round_beta else torch.float32)
    if N:
        block_hv = triton.next_power_of_2(HV)
        block_n = max(1, 512 // block_hv)
        gates_kernel[(triton.cdiv(N, block_n),)](
            *(a, b, A_log, dt_bias, g, beta, N, a.stride(0), b.stride(0)),
            HV=HV,
            BLOCK_N=block_n,
            BLOCK_HV=block_hv,
            num_warps=2,
        )
    return g, beta.to(torch.float32)
