# mypy: disable-error-code="no-untyped-def"
"""First launch of the fused layer step: short convolution, SiLU and the gates.

A program owns a block of channels of one request. What the prompt's tail adds is the same for all of its beams,
so it is summed once; a beam's own window is gathered through its ancestors. The k rows go straight to their record.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from onela.ops.gated_delta._replay_kernel import load_request, sigmoid


@triton.jit
def prompt_tail(p_conv_state, p_weight, i_prompt, depth, o_c, C: tl.constexpr, KERNEL: tl.constexpr):
    """Part of the convolution that still reaches into the prompt, [BLOCK_C] fp32."""
    b_tail = tl.zeros([o_c.shape[0]], tl.float32)
    for i in tl.static_range(KERNEL - 1):
        # The window's input i lies before the first decode step while i + depth < KERNEL - 1.
        m_tail = (o_c >= 0) & (i + depth < KERNEL - 1)
        p_input = p_conv_state + (i_prompt * C + o_c) * (KERNEL - 1) + i + depth
        b_input = tl.load(p_input, mask=m_tail, other=0.0).to(tl.float32)
        b_tail += tl.load(p_weight + o_c * KERNEL + i).to(tl.float32) * b_input
    return b_tail


@triton.jit
def write_gates(
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_g,
    p_beta,
    i_rows,
    m_live,
    s_a,
    s_b,
    HV: tl.constexpr,
    BLOCK_HV: tl.constexpr,
):
    """`g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)` of a tile of rows."""
    o_hv = tl.arange(0, BLOCK_HV)
    m_hv = o_hv < HV
    m_gate = m_live[:, None] & m_hv[None, :]
    b_a = tl.load(p_a + i_rows[:, None] * s_a + o_hv[None, :], mask=m_gate, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i_rows[:, None] * s_b + o_hv[None, :], mask=m_gate, other=0.0).to(tl.float32)
    b_bias = tl.load(p_dt_bias + o_hv, mask=m_hv, other=0.0).to(tl.float32)
    b_rate = tl.exp(tl.load(p_A_log + o_hv, mask=m_hv, other=0.0).to(tl.float32))
    b_a += b_bias[None, :]
    b_g = -b_rate[None, :] * (tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a))))
    tl.store(p_g + i_rows[:, None] * HV + o_hv[None, :], b_g, mask=m_gate)
    tl.store(p_beta + i_rows[:, None] * HV + o_hv[None, :], 1.0 / (1.0 + tl.exp(-b_b)), mask=m_gate)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_splits", "s_ancestors"])
def conv_gates_kernel(
    p_x,
    p_a,
    p_b,
    p_weight,
    p_A_log,
    p_dt_bias,
    p_conv_state,
    p_records_x,
    p_records_k,
    p_slots,
    p_ancestors,
    p_cu_rows,
    p_prompts,
    p_depths,
    p_qv,
    p_g,
    p_beta,
    num_rows,
    num_requests,
    num_splits,
    s_x,
    s_a,
    s_b,
    s_ancestors,
    QK: tl.constexpr,
    C: tl.constexpr,
    HV: tl.constexpr,
    KERNEL: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    if OVERLAP:
        # The second launch may load its states while this one drains; it waits before it reads what is written here.
        gdc_launch_dependents()
    i_split = tl.program_id(0)
    i_c = tl.program_id(1)
    i_request = tl.program_id(2)
    begin, end, i_prompt, depth = load_request(
        p_cu_rows, p_prompts, p_depths, i_request, num_requests, num_rows
    )
    begin += i_split * BLOCK_W
    if i_prompt < 0:
        return
    if begin >= end:
        return
    o_w = tl.arange(0, BLOCK_W)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    b_tail = prompt_tail(p_conv_state, p_weight, i_prompt, depth, o_c, C, KERNEL)
    for start in range(begin, end, num_splits * BLOCK_W):
        i_rows = (start + o_w).to(tl.int64)
        i_slot = tl.load(p_slots + i_rows, mask=i_rows < end, other=-1).to(tl.int64)
        m_live = i_slot >= 0
        b_x = tl.load(p_x + (i_rows * s_x)[:, None] + o_c[None, :], mask=m_live[:, None], other=0.0)
        b_y = b_x.to(tl.float32) * tl.load(p_weight + o_c * KERNEL + KERNEL - 1).to(tl.float32)[None, :]
        b_y += b_tail[None, :]
        for i in tl.static_range(1, KERNEL):
            if i <= MAX_DEPTH:
                m_back = m_live & (i <= depth)
                i_back = tl.load(p_ancestors + i_rows * s_ancestors + depth - i, mask=m_back, other=-1).to(
                    tl.int64
                )
                p_input = p_records_x + (i_back * C)[:, None] + o_c[None, :]
                b_input = tl.load(p_input, mask=(i_back >= 0)[:, None], other=0.0).to(tl.float32)
                b_y += b_input * tl.load(p_weight + o_c * KERNEL + KERNEL - 1 - i).to(tl.float32)[None, :]
        tl.store(p_records_x + (i_slot * C)[:, None] + o_c[None, :], b_x, mask=m_live[:, None])
        b_y = b_y * sigmoid(b_y, UPCAST)
        # A block lies in q, in k or in v: the first and the last go to the second launch, k to its record.
        if i_c * BLOCK_C // QK == 1:
            p_key = p_records_k + (i_slot * QK)[:, None] + (o_c - QK)[None, :]
            tl.store(p_key, b_y.to(p_records_k.dtype.element_ty), mask=m_live[:, None])
        else:
            o_y = tl.where(o_c < QK, o_c, o_c - QK)
            p_row = p_qv + (i_rows * (C - QK))[:, None] + o_y[None, :]
            tl.store(p_row, b_y.to(p_qv.dtype.element_ty), mask=m_live[:, None])
        if i_c == 0:
            write_gates(p_a, p_b, p_A_log, p_dt_bias, p_g, p_beta, i_rows, m_live, s_a, s_b, HV, BLOCK_HV)
