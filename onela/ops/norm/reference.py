"""Norms, rotary position and the gated MLP product, as Qwen3, Qwen3-Next and Qwen3.5 define them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float, check_index
from onela.ops._dtypes import compute_dtype


def rms_norm_ref(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> Tensor:
    """Root-mean-square norm over the last axis: `x / sqrt(mean(x**2) + eps) * (1 + weight)`.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        zero_centered: True: the factor is `1 + weight` (Qwen3.5, Qwen3-Next); False: it is `weight` (Qwen3).
        residual: [..., D] or None, in x's dtype or a wider one; if given, `residual += x` in place first, and the sum
            is what is normed.
    Returns:
        [..., D] in x's dtype.

    Writes: residual, when given.
    Numerics: fp32 inside. With `zero_centered` the result is rounded once, after the weight; without, the
        normed value is rounded to x's dtype before the weight, as in transformers' Qwen3.
    """
    out_dtype = x.dtype
    if residual is not None:
        residual += x
        x = residual
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1.0 + weight.to(dtype))).to(out_dtype)
    return weight * normed.to(out_dtype)


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Norm over the last axis, then the gate: `rms_norm(x) * weight * silu(gate)`.

    Args:
        x, gate: [..., V]; x may be fp32 while the gate is in the model's dtype.
        weight: [V], a plain factor (not `1 + weight`).
    Returns:
        [..., V] in the gate's dtype.

    Numerics: fp32 inside; the normed value is rounded to the gate's dtype before the weight, as in transformers.
    """
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((weight * normed.to(gate.dtype)).to(dtype) * F.silu(gate.to(dtype))).to(gate.dtype)


def rotary_angles_ref(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions: of `positions * frequencies`.

    Args:
        positions: [T] integers. frequencies: [R/2] fp32.
    Returns:
        cos, sin: [T, R/2] fp32, contiguous.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotary_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `R` dimensions of every head, pairs `(i, i + R/2)`; the rest pass through.

    Args:
        x: [T, H, D].
        cos, sin: [T, R/2] fp32.
    Returns:
        [T, H, D] in x's dtype.

    Numerics: cos and sin are rounded to x's dtype first, as in transformers.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def qk_norm_rotary_ref(
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
    """Norm every head of q and k, then rotate its first `R` dimensions: `rotary(rms_norm(x))`.

    Args:
        q: [T, HQ, D]; k: [T, HKV, D].
        q_weight, k_weight: [D].
        cos, sin: [T, R/2] fp32.
        eps, zero_centered: as in `rms_norm_ref`.
        in_place: put the results where q and k are.
        v: [T, HKV, D]; k_cache, v_cache: [pages, page_size, HKV, D], contiguous; page_rows: [T] int32, the row
            `page * page_size + place` of the caches where a row's new keys and its values go; None: nowhere.
    Returns:
        q, k: as given.

    Writes: q and k when `in_place`; the caches' `page_rows`.
    Padding: keys and values of a row whose page row is -1 go nowhere.
    Aliasing: no two rows have the same page row.
    Numerics: as in `rms_norm_ref` and `rotary_ref`.
    Raises: ShapeError, DtypeError.
    """
    check_qk(q, k, q_weight, k_weight, cos, sin, v, k_cache, v_cache, page_rows)
    q_out = rotary_ref(rms_norm_ref(q, q_weight, eps=eps, zero_centered=zero_centered), cos, sin)
    k_out = rotary_ref(rms_norm_ref(k, k_weight, eps=eps, zero_centered=zero_centered), cos, sin)
    if in_place:
        q_out, k_out = q.copy_(q_out), k.copy_(k_out)
    if page_rows is not None:
        assert v is not None
        kept = page_rows >= 0
        for rows, cache in ((k_out, k_cache), (v, v_cache)):
            assert cache is not None
            cache.view(-1, *k.shape[1:])[page_rows[kept].long()] = rows[kept].to(cache.dtype)
    return q_out, k_out


def check_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    page_rows: Tensor | None,
) -> None:
    """Raise `ShapeError` or `DtypeError` unless the arguments of `qk_norm_rotary` fit each other."""
    T, _, D = q.shape
    check_float("k", k, T, None, D)
    check_float("q_weight", q_weight, D)
    check_float("k_weight", k_weight, D)
    check_float("cos", cos, T, None)
    check_float("sin", sin, *cos.shape)
    if page_rows is None:
        return
    check_index("page_rows", page_rows, T)
    if v is None or k_cache is None or v_cache is None:
        raise ShapeError("v, k_cache, v_cache: none may be missing when page_rows are given")
    check_float("v", v, *k.shape)
    check_float("k_cache", k_cache, None, None, *k.shape[1:])
    check_float("v_cache", v_cache, *k_cache.shape)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection. Args: gate_up: [N, 2*D], gate first. Returns: [N, D]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid_gate_ref(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, both [T, H, D] of one dtype; the sigmoid is rounded to it first. Returns: [T, H, D]."""
    return x * gate.sigmoid()
