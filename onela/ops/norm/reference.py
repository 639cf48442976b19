"""Norms, rotary position and the gated MLP product, as Qwen3, Qwen3-Next and Qwen3.5 define them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
) -> tuple[Tensor, Tensor]:
    """Norm every head of q and k, then rotate its first `R` dimensions: `rotary(rms_norm(x))`.

    Args:
        q: [T, HQ, D]; k: [T, HKV, D].
        q_weight, k_weight: [D].
        cos, sin: [T, R/2] fp32.
        eps, zero_centered: as in `rms_norm_ref`.
    Returns:
        q, k: as given.

    Numerics: as in `rms_norm_ref` and `rotary_ref`.
    """
    q = rms_norm_ref(q, q_weight, eps=eps, zero_centered=zero_centered)
    k = rms_norm_ref(k, k_weight, eps=eps, zero_centered=zero_centered)
    return rotary_ref(q, cos, sin), rotary_ref(k, cos, sin)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection. Args: gate_up: [N, 2*D], gate first. Returns: [N, D]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid_gate_ref(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, both [T, H, D] of one dtype; the sigmoid is rounded to it first. Returns: [T, H, D]."""
    return x * gate.sigmoid()
