"""What the Gated DeltaNet kernels refuse: shapes, dtypes, layouts and head sizes they cannot take."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._checks import check_float, check_groups, check_index, check_shape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_size(name: str, size: int) -> None:
    """Raise `ShapeError` unless a head size is a power of two from 16 to 512."""
    if size < 16 or size > 512 or size & (size - 1):
        raise ShapeError(f"{name}: expected a power of two from 16 to 512, got {size}")


def check_layout(name: str, tensor: Tensor, *, contiguous: bool = False) -> None:
    """Raise unless a kernel can read the tensor: a known dtype, contiguous (or only its last axis)."""
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        raise DtypeError(f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}")
    readable = tensor.is_contiguous() if contiguous else tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if not readable:
        wanted = "a contiguous tensor" if contiguous else "a contiguous last axis"
        raise ShapeError(f"{name}: expected {wanted}, got strides {list(tensor.stride())}")


def check_rows(q: Tensor, k: Tensor | None, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse a step's rows when the kernels cannot take them."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    check_groups(HV, H)
    check_size("K", K)
    check_size("V", V)
    check_float("v", v, N, HV, V)
    check_float("g", g, N, HV)
    check_float("beta", beta, N, HV)
    if k is not None:
        check_float("k", k, N, H, K)
        check_layout("k", k)
    for name, tensor in {"q": q, "v": v, "g": g, "beta": beta}.items():
        check_layout(name, tensor)


def check_records(
    records_g: Tensor, records_delta: Tensor, records_k: Tensor, *, H: int, HV: int, K: int, V: int
) -> None:
    """Refuse record tensors of a wrong shape, or not contiguous."""
    check_float("records_g", records_g, None, HV)
    check_float("records_delta", records_delta, None, HV, V)
    check_float("records_k", records_k, None, H, K)
    check_layout("records_g", records_g, contiguous=True)
    check_layout("records_delta", records_delta, contiguous=True)
    check_layout("records_k", records_k, contiguous=True)


def check_state(recurrent_state: Tensor, *, HV: int, K: int, V: int) -> None:
    """Refuse a prompt state that is neither fp32 [P, HV, V, K] nor split bf16 [P, HV, 2, V, K]."""
    if recurrent_state.dim() == 5:
        check_shape("recurrent_state", recurrent_state, None, HV, 2, V, K)
    else:
        check_shape("recurrent_state", recurrent_state, None, HV, V, K)
    wanted = torch.bfloat16 if recurrent_state.dim() == 5 else torch.float32
    if recurrent_state.dtype != wanted:
        axes, given = recurrent_state.dim(), recurrent_state.dtype
        raise DtypeError(f"recurrent_state: expected {wanted} for {axes} axes, got {given}")
    check_layout("recurrent_state", recurrent_state, contiguous=True)


def check_step(
    N: int, slots: Tensor, ancestors: Tensor, cu_rows: Tensor, prompts: Tensor, depths: Tensor
) -> None:
    """Refuse a step's index tensors when they do not fit together."""
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("prompts", prompts, None)
    check_index("cu_rows", cu_rows, prompts.shape[0] + 1)
    check_index("depths", depths, prompts.shape[0])
    check_layout("ancestors", ancestors)
    for name, tensor in {"slots": slots, "prompts": prompts, "cu_rows": cu_rows, "depths": depths}.items():
        check_layout(name, tensor, contiguous=True)
