# mypy: disable-error-code="no-untyped-def"
"""Kernels of the FullState baseline: one program per row, value head and block of the state's rows.

A step moves each state once in and once out, so the kernel is nothing but bytes: a program takes a block small
enough to stay in registers, and everything else about the row is read again from the caches.
"""

import triton
import triton.language as tl


@triton.jit
def load_row(p_row, i_row, i_head, o_x, s_n, s_h):
    """One head's vector of one row, as fp32."""
    return tl.load(p_row + i_row * s_n + i_head * s_h + o_x).to(tl.float32)


@triton.jit
def full_state_step_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_states,
    p_prompt,
    p_read_rows,
    p_write_rows,
    p_row_prompts,
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
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64) // (HV * (V // BLOCK_V))
    i_part = tl.program_id(0) % (HV * (V // BLOCK_V))
    i_hv = i_part // (V // BLOCK_V)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, K)
    o_v = (i_part % (V // BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_state = o_v[:, None] * K + o_k[None, :]
    p_out = p_o + (i_n * HV + i_hv) * V + o_v
    i_write = tl.load(p_write_rows + i_n).to(tl.int64)
    i_read = tl.load(p_read_rows + i_n).to(tl.int64)
    if i_write < 0:
        tl.store(p_out, tl.zeros([BLOCK_V], p_o.dtype.element_ty))
        return
    b_q = load_row(p_q, i_n, i_h, o_k, s_q_n, s_q_h)
    b_k = load_row(p_k, i_n, i_h, o_k, s_k_n, s_k_h)
    b_v = load_row(p_v, i_n, i_hv, o_v, s_v_n, s_v_h)
    b_alpha = tl.exp(tl.load(p_g + i_n * s_g + i_hv).to(tl.float32))
    b_beta = tl.load(p_beta + i_n * s_beta + i_hv).to(tl.float32)
    if i_read >= 0:
        b_state = tl.load(p_states + (i_read * HV + i_hv) * (V * K) + o_state).to(tl.float32)
    else:
        i_prompt = tl.load(p_row_prompts + i_n).to(tl.int64)
        b_state = tl.load(p_prompt + (i_prompt * HV + i_hv) * (V * K) + o_state).to(tl.float32)
    b_q = b_q * (scale * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6))
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    b_state = b_state * b_alpha
    b_delta = b_beta * (b_v - tl.sum(b_state * b_k[None, :], 1))
    b_state += b_delta[:, None] * b_k[None, :]
    b_o = tl.sum(b_state * b_q[None, :], 1)
    tl.store(p_out, b_o.to(p_o.dtype.element_ty))
    p_new = p_states + (i_write * HV + i_hv) * (V * K) + o_state
    tl.store(p_new, b_state.to(p_states.dtype.element_ty))


@triton.jit
def reorder_states_kernel(p_states, p_out, p_parents, row_size, BLOCK: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    i_parent = tl.load(p_parents + i_n).to(tl.int64)
    if i_parent < 0:
        return
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_states + i_parent * row_size + o_x, mask=o_x < row_size, other=0)
    tl.store(p_out + i_n * row_size + o_x, b_x, mask=o_x < row_size)
