# mypy: disable-error-code="no-untyped-def"
"""The norms and rotations of all query and key heads in one launch, which may put keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._overlap import overlap_of, wait_for_previous
from onela.ops.norm.reference import check_qk


@triton.jit
def _lefts(HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A head's dimensions whose partner lies `HALF` further: the left halves of its pieces of `2 * HALF`."""
    o_p = tl.arange(0, BLOCK)
    return o_p // HALF * (2 * HALF) + o_p % HALF


@triton.jit
def _weigh(b_x, scale, p_weight, o_d, in_d, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Heads under their norm, rounded as in its reference."""
    b_w = tl.load(p_weight + o_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if CENTERED:
        b_x = b_x * scale * (1.0 + b_w)
    else:
        b_x = (b_x * scale).to(dtype).to(tl.float32) * b_w
    return b_x.to(dtype).to(tl.float32)


@triton.jit
def _pairs(p_x, at, valid, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Heads of one row: a number and its partner are at the same place of two tiles."""
    p_left = p_x + at[:, None] + _lefts(HALF, BLOCK)[None, :]
    mask = valid[:, None] & (tl.arange(0, BLOCK) < D // 2)[None, :]
    return p_left, mask


@triton.jit
def _norm_rotary(
    b_left, b_right, p_weight, b_cos, b_sin, eps, dtype: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    b_left = b_left.to(tl.float32)
    b_right = b_right.to(tl.float32)
    o_d = _lefts(HALF, BLOCK)
    in_d = tl.arange(0, BLOCK) < D // 2
    scale = tl.rsqrt(tl.sum(b_left * b_left + b_right * b_right, 1) / D + eps)[:, None]
    b_left = _weigh(b_left, scale, p_weight, o_d, in_d, dtype, CENTERED)
    b_right = _weigh(b_right, scale, p_weight + HALF, o_d, in_d, dtype, CENTERED)
    return (b_left * b_cos - b_right * b_sin).to(dtype), (b_right * b_cos + b_left * b_sin).to(dtype)


@triton.jit
def qk_norm_rotary_kernel(
    p_q, p_k, p_v, p_q_weight, p_k_weight, p_cos, p_sin, p_q_out, p_k_out, p_k_cache, p_v_cache, p_page_rows,
    s_q, s_q_head, s_k, s_k_head, s_v, s_v_head, s_q_out, s_q_out_head, s_k_out, s_k_out_head, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CENTERED: tl.constexpr, PAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All heads of one row."""
    wait_for_previous(OVERLAP)
    i_n = tl.program_id(0).to(tl.int64)
    dtype = p_q_out.dtype.element_ty
    o_q = tl.arange(0, BLOCK_Q)
    o_k = tl.arange(0, BLOCK_K)
    BLOCK: tl.constexpr = BLOCK_D // 2
    # All that is read comes first: no load may pass a store.
    p_q_left, in_q = _pairs(p_q, i_n * s_q + o_q * s_q_head, o_q < HQ, D, HALF, BLOCK)
    p_k_left, in_k = _pairs(p_k, i_n * s_k + o_k * s_k_head, o_k < HKV, D, HALF, BLOCK)
    b_q_left = tl.load(p_q_left, mask=in_q, other=0.0)
    b_q_right = tl.load(p_q_left + HALF, mask=in_q, other=0.0)
    b_k_left = tl.load(p_k_left, mask=in_k, other=0.0)
    b_k_right = tl.load(p_k_left + HALF, mask=in_k, other=0.0)
    if PAGES:
        o_d = tl.arange(0, BLOCK_D)
        in_v = (o_k < HKV)[:, None] & (o_d < D)[None, :]
        b_v = tl.load(p_v + i_n * s_v + (o_k * s_v_head)[:, None] + o_d[None, :], mask=in_v, other=0.0)
        page = tl.load(p_page_rows + i_n).to(tl.int64)
    # What is not turned is turned by nothing.
    o_p = tl.arange(0, BLOCK)
    b_cos = tl.load(p_cos + i_n * HALF + o_p, mask=o_p < HALF, other=1.0).to(dtype).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + i_n * HALF + o_p, mask=o_p < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
    b_k_left, b_k_right = _norm_rotary(
        b_k_left, b_k_right, p_k_weight, b_cos, b_sin, eps, dtype, D, HALF, BLOCK, CENTERED
    )
    b_q_left, b_q_right = _norm_rotary(
        b_q_left, b_q_right, p_q_weight, b_cos, b_sin, eps, dtype, D, HALF, BLOCK, CENTERED
    )
    if PAGES:
        at_page = page * (HKV * D) + o_k * D
        p_kept, _ = _pairs(p_k_cache, at_page, o_k < HKV, D, HALF, BLOCK)
        tl.store(p_kept, b_k_left, mask=in_k & (page >= 0))
        tl.store(p_kept + HALF, b_k_right, mask=in_k & (page >= 0))
        tl.store(p_v_cache + at_page[:, None] + o_d[None, :], b_v, mask=in_v & (page >= 0))
    p_k_left, _ = _pairs(p_k_out, i_n * s_k_out + o_k * s_k_out_head, o_k < HKV, D, HALF, BLOCK)
    tl.store(p_k_left, b_k_left, mask=in_k)
    tl.store(p_k_left + HALF, b_k_right, mask=in_k)
    p_q_left, _ = _pairs(p_q_out, i_n * s_q_out + o_q * s_q_out_head, o_q < HQ, D, HALF, BLOCK)
    tl.store(p_q_left, b_q_left, mask=in_q)
    tl.store(p_q_left + HALF, b_q_right, mask=in_q)


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
    in_place: bool = False,
    v: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    page_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary_ref` in one launch.

    Args, Returns, Writes, Padding: as in `qk_norm_rotary_ref`; `R` divides D.

    Layout: the last axis of every tensor is contiguous; rows and heads of q, k and v may be strided. The results are
        contiguous, unless they are q and k themselves.
    Numerics: as in `qk_norm_rotary_ref`, but the rotation's products are fp32 and rounded once; deterministic.
    Raises: ShapeError, DtypeError.
    """
    check_qk(q, k, q_weight, k_weight, cos, sin, v, k_cache, v_cache, page_rows)
    T, HQ, D = q.shape
    HKV, half = k.shape[1], cos.shape[-1]
    block_k, block_d = triton.next_power_of_2(HKV), triton.next_power_of_2(D)
    q_out, k_out = (x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if T == 0:
        return q_out, k_out
    if D % (2 * half):
        raise ShapeError(f"cos: as many columns as half of a part of {D} dimensions are needed, got {half}")
    pages = page_rows is not None
    values = v if pages and v is not None else k
    qk_norm_rotary_kernel[(T,)](
        q, k, values, q_weight, k_weight, cos.contiguous(), sin.contiguous(), q_out, k_out,
        *((k_cache, v_cache, page_rows) if pages else (k_out, k_out, q_weight)),
        *q.stride()[:2], *k.stride()[:2], *values.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2], eps,
        HQ=HQ, HKV=HKV, D=D, HALF=half, BLOCK_Q=triton.next_power_of_2(HQ), BLOCK_K=block_k, BLOCK_D=block_d,
        CENTERED=zero_centered, PAGES=pages,
        # With more warps than fill a tile of key heads, the angles would change their layout through shared memory.
        num_warps=4 if block_k * block_d >= 1024 else 1, **overlap_of(q.device),
    )  # fmt: skip
    return q_out, k_out
