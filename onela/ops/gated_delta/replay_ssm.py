"""The ReplaySSM baseline: a checkpoint, per beam or shared, and a buffer of every beam's own past transitions."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops._checks import check_float, check_index
from onela.ops.gated_delta._checks import check_layout, check_rows
from onela.ops.gated_delta._replay_ssm_kernel import replay_ssm_step_kernel


def replay_ssm_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    checkpoints: Tensor,
    checkpoint_rows: Tensor,
    buffer_g: Tensor,
    buffer_delta: Tensor,
    buffer_k: Tensor,
    rows: Tensor,
    row_depths: Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One decode step from checkpoints and buffers: the contract of `replay_ssm_step_ref`, in one launch.

    Args:
        as in `replay_ssm_step_ref`; floats are bf16, fp16 or fp32; K and V are powers of two from 16 to 512.
    Returns:
        o: [N, HV, V].

    Writes, Padding, Aliasing: as in `replay_ssm_step_ref`.
    Layout: checkpoints and buffers are contiguous; rows and heads of q, k and v, and rows of g and beta, may be
        strided.
    Numerics: fp32 arithmetic; deterministic.
    Raises: ShapeError, DtypeError.
    """
    return launch_replay_ssm(
        *(q, k, v, g, beta, checkpoints, checkpoint_rows, buffer_g, buffer_delta, buffer_k, rows, row_depths),
        *(scale, out_dtype),
    )


def launch_replay_ssm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    checkpoints: Tensor,
    checkpoint_rows: Tensor,
    buffer_g: Tensor,
    buffer_delta: Tensor,
    buffer_k: Tensor,
    rows: Tensor,
    row_depths: Tensor,
    scale: float | None,
    out_dtype: torch.dtype | None,
    *,
    block_v: int | None = None,
    num_warps: int = 1,
) -> Tensor:
    """`replay_ssm_step_triton` with the block of state rows and the warps given; None picks by shape."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    check_rows(q, k, v, g, beta)
    T = buffer_g.shape[1]
    check_float("checkpoints", checkpoints, None, HV, V, K)
    check_float("buffer_g", buffer_g, None, T, HV)
    check_float("buffer_delta", buffer_delta, buffer_g.shape[0], T, HV, V)
    check_float("buffer_k", buffer_k, buffer_g.shape[0], T, H, K)
    buffers = {"buffer_g": buffer_g, "buffer_delta": buffer_delta, "buffer_k": buffer_k}
    for name, tensor in {"checkpoints": checkpoints, **buffers}.items():
        check_layout(name, tensor, contiguous=True)
    index = {"checkpoint_rows": checkpoint_rows, "rows": rows, "row_depths": row_depths}
    for name, tensor in index.items():
        check_index(name, tensor, N)
        check_layout(name, tensor, contiguous=True)
    o = torch.empty(N, HV, V, device=v.device, dtype=q.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    block_v = min(V, block_v or max(4, 4096 // K))
    replay_ssm_step_kernel[(N * HV * (V // block_v),)](
        *(q, k, v, g, beta, checkpoints, checkpoint_rows, buffer_g, buffer_delta, buffer_k, rows, row_depths),
        o,
        K**-0.5 if scale is None else scale,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(g.stride(0), beta.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        T=T,
        BLOCK_V=block_v,
        num_warps=num_warps,
        # For bf16 states the compiler would take half as many registers again as for fp32 ones (K = V = 128), and
        # a third fewer programs would fit on a multiprocessor.
        maxnreg=168 if checkpoints.dtype.itemsize == 2 else None,
    )
    return o
