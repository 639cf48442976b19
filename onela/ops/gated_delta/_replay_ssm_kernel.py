# mypy: disable-error-code="no-untyped-def"
"""Kernel of the ReplaySSM baseline: rebuild a row's state from its checkpoint, read it once, drop it."""

import triton
import triton.language as tl

from onela.ops.gated_delta._full_state_kernel import load_row


@triton.jit
def replay_ssm_step_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_checkpoints,
    p_checkpoint_rows,
    p_buffer_g,
    p_buffer_delta,
    p_buffer_k,
    p_rows,
    p_row_depths,
    p_o,
    scale,
    s_q_n,
    s_q_h,
    s_k_n,
    s_k_h,
    s_v_n,
    s_v_h,
    s_g,
    s_beta,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64) // (HV * (V // BLOCK_V))
    i_part = tl.program_id(0) % (HV * (V // BLOCK_V))
    i_hv = i_part // (V // BLOCK_V)
    i_v = i_part % (V // BLOCK_V)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_out = p_o + (i_n * HV + i_hv) * V + o_v
    i_row = tl.load(p_rows + i_n).to(tl.int64)
    if i_row < 0:
        tl.store(p_out, tl.zeros([BLOCK_V], p_o.dtype.element_ty))
        return
    i_checkpoint = tl.load(p_checkpoint_rows + i_n).to(tl.int64)
    depth = tl.load(p_row_depths + i_n).to(tl.int32)
    p_state = p_checkpoints + (i_checkpoint * HV + i_hv) * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_state = tl.load(p_state).to(tl.float32)
    b_q = load_row(p_q, i_n, i_h, o_k, s_q_n, s_q_h)
    b_xk = tl.load(p_k + i_n * s_k_n + i_h * s_k_h + o_k)
    b_v = load_row(p_v, i_n, i_hv, o_v, s_v_n, s_v_h)
    b_g = tl.load(p_g + i_n * s_g + i_hv).to(tl.float32)
    b_beta = tl.load(p_beta + i_n * s_beta + i_hv).to(tl.float32)
    b_k = b_xk.to(tl.float32)
    b_k_scale = tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    b_q = b_q * (scale * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6))
    b_k = b_k * b_k_scale
    for j in range(depth):
        i_buffer = i_row * T + j
        b_decay = tl.exp(tl.load(p_buffer_g + i_buffer * HV + i_hv))
        b_key = tl.load(p_buffer_k + (i_buffer * H + i_h) * K + o_k).to(tl.float32)
        b_past = tl.load(p_buffer_delta + (i_buffer * HV + i_hv) * V + o_v).to(tl.float32)
        b_state = b_state * b_decay + b_past[:, None] * b_key[None, :]
    b_alpha = tl.exp(b_g)
    b_delta = b_beta * (b_v - b_alpha * tl.sum(b_state * b_k[None, :], 1))
    b_o = b_alpha * tl.sum(b_state * b_q[None, :], 1) + b_delta * tl.sum(b_k * b_q, 0)
    tl.store(p_out, b_o.to(p_o.dtype.element_ty))
    i_new = i_row * T + depth
    p_new = p_buffer_delta + (i_new * HV + i_hv) * V + o_v
    tl.store(p_new, (b_delta * b_k_scale).to(p_buffer_delta.dtype.element_ty))
    if i_v == 0:
        tl.store(p_buffer_g + i_new * HV + i_hv, b_g)
        if i_hv % (HV // H) == 0:
            tl.store(p_buffer_k + (i_new * H + i_h) * K + o_k, b_xk.to(p_buffer_k.dtype.element_ty))
