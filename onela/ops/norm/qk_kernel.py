"""The norms and rotations of all query and key heads in one launch: four passes over memory become one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.ops._checks import check_float
from onela.ops._overlap import overlap_of, wait_for_previous


@triton.jit
def _norm_rotary(
    p_x, p_weight, p_o, b_cos, b_sin, at_x, at_o, valid, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Heads of one row, from `at_x` to `at_o`; cosine and sine of every dimension, the sine with its sign."""
    o_d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (o_d < D)[None, :]
    dtype = p_o.dtype.element_ty
    # A rotated dimension meets its partner: a second read of the row, which lies in the first-level cache.
    partner = tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))
    b_x = tl.load(p_x + at_x[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    b_y = tl.load(p_x + at_x[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    w_x = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    w_y = tl.load(p_weight + partner, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if CENTERED:
        b_x = b_x * b_scale * (1.0 + w_x)
        b_y = b_y * b_scale * (1.0 + w_y)
    else:
        b_x = (b_x * b_scale).to(dtype).to(tl.float32) * w_x
        b_y = (b_y * b_scale).to(dtype).to(tl.float32) * w_y
    b_x = b_x.to(dtype).to(tl.float32)
    b_y = b_y.to(dtype).to(tl.float32)
    b_o = tl.where((o_d < 2 * HALF)[None, :], b_x * b_cos + b_y * b_sin, b_x)
    tl.store(p_o + at_o[:, None] + o_d[None, :], b_o.to(dtype), mask=mask)


@triton.jit
def qk_norm_rotary_kernel(
    p_q, p_k, p_q_weight, p_k_weight, p_cos, p_sin, p_q_out, p_k_out, s_q, s_q_head, s_k, s_k_head, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CENTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All heads of one row."""
    wait_for_previous(OVERLAP)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    dtype = p_q_out.dtype.element_ty
    angle = i_n * HALF + o_d % HALF
    b_cos = tl.load(p_cos + angle, mask=o_d < 2 * HALF, other=0.0).to(dtype).to(tl.float32)
    b_sin = tl.load(p_sin + angle, mask=o_d < 2 * HALF, other=0.0).to(dtype).to(tl.float32)
    b_cos = b_cos[None, :]
    b_sin = tl.where(o_d < HALF, -b_sin, b_sin)[None, :]
    o_h = tl.arange(0, BLOCK_Q)
    _norm_rotary(
        p_q, p_q_weight, p_q_out, b_cos, b_sin, i_n * s_q + o_h * s_q_head, (i_n * HQ + o_h) * D, o_h < HQ,
        eps, D, HALF, BLOCK_D, CENTERED,
    )  # fmt: skip
    o_h = tl.arange(0, BLOCK_K)
    _norm_rotary(
        p_k, p_k_weight, p_k_out, b_cos, b_sin, i_n * s_k + o_h * s_k_head, (i_n * HKV + o_h) * D, o_h < HKV,
        eps, D, HALF, BLOCK_D, CENTERED,
    )  # fmt: skip


def qk_norm_rotary_triton(
    q: Tensor,
    k: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    zero_centered: bool = True,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary_ref` in one launch.

    Args, Returns: as in `qk_norm_rotary_ref`; the results are contiguous.

    Layout: the last axis of every tensor is contiguous; rows and heads of q and k may be strided.
    Numerics: as in `qk_norm_rotary_ref`, but the rotation's products are fp32 and rounded once; deterministic.
    Raises: ShapeError.
    """
    T, HQ, D = q.shape
    HKV, half = k.shape[1], cos.shape[-1]
    check_float("k", k, T, HKV, D)
    check_float("q_weight", q_weight, D)
    check_float("k_weight", k_weight, D)
    check_float("cos", cos, T, half)
    check_float("sin", sin, T, half)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if T == 0:
        return q_out, k_out
    qk_norm_rotary_kernel[(T,)](
        q, k, q_weight, k_weight, cos.contiguous(), sin.contiguous(), q_out, k_out, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), eps,
        HQ=HQ, HKV=HKV, D=D, HALF=half, BLOCK_D=triton.next_power_of_2(D), BLOCK_Q=triton.next_power_of_2(HQ),
        BLOCK_K=triton.next_power_of_2(HKV), CENTERED=zero_centered, num_warps=4, **overlap_of(q.device),
    )  # fmt: skip
    return q_out, k_out
