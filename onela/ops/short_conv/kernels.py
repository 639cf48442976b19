# mypy: disable-error-code="no-untyped-def"
"""One step of the short convolution in Triton: a program owns a block of channels of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_index


@triton.jit
def short_conv_step_kernel(
    p_x, p_weight, p_conv_state, p_records_x, p_slots, p_ancestors, p_cu_rows, p_prompts, p_depths, p_o,
    B, C, s_x, s_ancestors, KERNEL: tl.constexpr, MAX_DEPTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
    ROUND_SUM: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.arange(0, BLOCK_B)
    # The request whose rows hold this one; past the last request nothing is live.
    i_request = tl.sum((tl.load(p_cu_rows + 1 + o_b, mask=o_b < B, other=2147483647) <= i_n).to(tl.int32), 0)
    i_prompt = tl.load(p_prompts + i_request, mask=i_request < B, other=-1).to(tl.int64)
    i_slot = tl.load(p_slots + i_n).to(tl.int64)
    live = (i_slot >= 0) & (i_prompt >= 0)
    m_live = m_c & live
    depth = tl.load(p_depths + i_request, mask=i_request < B, other=0)
    b_x = tl.load(p_x + i_n * s_x + o_c, mask=m_live, other=0.0)
    b_y = b_x.to(tl.float32) * tl.load(p_weight + o_c * KERNEL + KERNEL - 1, mask=m_c, other=0.0).to(
        tl.float32
    )
    for back in tl.static_range(1, KERNEL):
        b_w = tl.load(p_weight + o_c * KERNEL + KERNEL - 1 - back, mask=m_c, other=0.0).to(tl.float32)
        if back <= MAX_DEPTH:
            m_back = live & (back <= depth)
            i_back = tl.load(p_ancestors + i_n * s_ancestors + depth - back, mask=m_back, other=-1).to(
                tl.int64
            )
            b_back = tl.load(p_records_x + i_back * C + o_c, mask=m_c & (i_back >= 0), other=0.0)
            b_y += b_w * b_back.to(tl.float32)
        # Before the first decode step lies the prompt: input `KERNEL - 1 - back + depth` of its tail.
        p_tail = p_conv_state + (i_prompt * C + o_c) * (KERNEL - 1) + KERNEL - 1 - back + depth
        b_y += b_w * tl.load(p_tail, mask=m_live & (back > depth), other=0.0).to(tl.float32)
    tl.store(p_records_x + i_slot * C + o_c, b_x.to(p_records_x.dtype.element_ty), mask=m_live)
    if ROUND_SUM:
        b_y = b_y.to(p_o.dtype.element_ty).to(tl.float32)
    b_y = b_y / (1.0 + tl.exp(-b_y))
    tl.store(p_o + i_n * C + o_c, b_y.to(p_o.dtype.element_ty), mask=m_c)


def short_conv_step_triton(
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
    """One step of the convolution for every beam: the contract of `short_conv_step_ref`, in one launch.

    Args:
        as in `short_conv_step_ref`.
    Returns:
        y: [N, conv_dim] in x's dtype, contiguous.

    Writes, Padding, Aliasing, Numerics: as in `short_conv_step_ref`.
    Layout: rows of x and ancestors may be strided; all else is contiguous.
    Raises: ShapeError, DtypeError.
    """
    N, C = x.shape
    kernel_size = weight.shape[1]
    check_float("weight", weight, C, None)
    check_float("conv_state", conv_state, None, C, kernel_size - 1)
    check_float("records_x", records_x, None, C)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("prompts", prompts, cu_rows.shape[0] - 1)
    check_index("depths", depths, cu_rows.shape[0] - 1)
    for name, tensor in {"weight": weight, "conv_state": conv_state, "records_x": records_x}.items():
        if not tensor.is_contiguous():
            raise DtypeError(f"{name}: must be contiguous, got strides {tensor.stride()}")
    if x.stride(-1) != 1:
        raise DtypeError(f"x: the channels of a row must be contiguous, got strides {x.stride()}")
    o = torch.empty(N, C, dtype=x.dtype, device=x.device)
    B = prompts.shape[0]
    if N == 0:
        return o
    block_c = min(1024, triton.next_power_of_2(C))
    short_conv_step_kernel[(N, triton.cdiv(C, block_c))](
        x, weight, conv_state, records_x, slots, ancestors, cu_rows, prompts, depths, o,
        B, C, x.stride(0), ancestors.stride(0),
        KERNEL=kernel_size, MAX_DEPTH=min(kernel_size - 1, ancestors.shape[1]), BLOCK_C=block_c,
        BLOCK_B=max(2, triton.next_power_of_2(B)), ROUND_SUM=round_sum, num_warps=4,
    )  # fmt: skip
    return o
