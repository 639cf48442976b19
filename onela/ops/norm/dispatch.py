"""Which implementation of a row-wise op runs: the kernel for tensors on a GPU, else the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onela.ops.norm.reference import (
    gated_rms_norm_ref,
    qk_norm_rotary_ref,
    rms_norm_ref,
    rotary_angles_ref,
    rotary_ref,
    sigmoid_gate_ref,
    swiglu_ref,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> Tensor:
    """`rms_norm_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if _readable(x, residual):
        from onela.ops.norm.kernels import rms_norm_triton

        return rms_norm_triton(x, weight, eps=eps, zero_centered=zero_centered, residual=residual)
    return rms_norm_ref(x, weight, eps=eps, zero_centered=zero_centered, residual=residual)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`gated_rms_norm_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if _readable(x, gate):
        from onela.ops.norm.kernels import gated_rms_norm_triton

        return gated_rms_norm_triton(x, gate, weight, eps=eps)
    return gated_rms_norm_ref(x, gate, weight, eps=eps)


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_angles_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if positions.is_cuda and positions.dim() == 1 and positions.stride(0) == 1:
        from onela.ops.norm.kernels import rotary_angles_triton

        return rotary_angles_triton(positions, frequencies)
    return rotary_angles_ref(positions, frequencies)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if _readable(x, None):
        from onela.ops.norm.kernels import rotary_triton

        return rotary_triton(x, cos, sin)
    return rotary_ref(x, cos, sin)


def qk_norm_rotary(
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
    """`qk_norm_rotary_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    options: dict[str, Any] = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "cos": cos,
        "sin": sin,
        "eps": eps,
        "zero_centered": zero_centered,
        "in_place": in_place,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_rows": page_rows,
    }
    whole = q.shape[-1] % (2 * cos.shape[-1]) == 0
    if whole and _readable(q, None) and _readable(k, v) and q.dim() == 3 and q.dtype == k.dtype:
        from onela.ops.norm.qk_kernel import qk_norm_rotary_triton

        return qk_norm_rotary_triton(q, k, **options)
    return qk_norm_rotary_ref(q, k, **options)


def swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if gate_up.dim() == 2 and _readable(gate_up, None):
        from onela.ops.norm.kernels import swiglu_triton

        return swiglu_triton(gate_up)
    return swiglu_ref(gate_up)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`sigmoid_gate_ref`, by its kernel on a GPU. Same arguments, results and errors."""
    if _readable(x, gate):
        from onela.ops.norm.kernels import sigmoid_gate_triton

        return sigmoid_gate_triton(x, gate)
    return sigmoid_gate_ref(x, gate)


def _readable(x: Tensor, other: Tensor | None) -> bool:
    """Whether the kernels can read the tensors: on a GPU, two or three axes, the last one contiguous."""
    tensors = (x,) if other is None else (x, other)
    return x.is_cuda and all(
        t.dim() in (2, 3) and t.dtype in FLOATS and t.stride(-1) == 1 and t.shape == x.shape for t in tensors
    )
