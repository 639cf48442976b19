"""Projection replay as one portable Triton kernel (sm_80 and newer, and Triton's interpreter)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onela.ops.gated_delta._checks import check_records, check_rows, check_state, check_step
from onela.ops.gated_delta._launch import INTERPRETED, ReplayConfig, choose_splits
from onela.ops.gated_delta._replay_kernel import gated_delta_replay_kernel


def replay_step_triton(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    recurrent_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One decode step of every beam by projection replay: the contract of `replay_step_ref`, in one launch.

    Args:
        as in `replay_step_ref`; floats are bf16, fp16 or fp32; K and V are powers of two from 16 to 512.
    Returns:
        o: [N, HV, V].

    Writes, Padding, Aliasing: as in `replay_step_ref`.
    Layout: the last axis of every tensor is contiguous. Records and state are contiguous; rows and heads of
        q, k and v, and rows of g, beta and ancestors, may be strided.
    Numerics: fp32 accumulation; bf16 q and k meet the state as two bf16 halves (16 bits of mantissa), wider
        ones as tf32x3; deterministic; a row does not depend on the other rows.
    Raises: ShapeError, DtypeError.
    """
    return launch_replay(
        q,
        k,
        v,
        g,
        beta,
        recurrent_state=recurrent_state,
        records_g=records_g,
        records_delta=records_delta,
        records_k=records_k,
        slots=slots,
        ancestors=ancestors,
        cu_rows=cu_rows,
        prompts=prompts,
        depths=depths,
        scale=scale,
        out_dtype=out_dtype,
        config=None,
    )


def launch_replay(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    recurrent_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None,
    out_dtype: torch.dtype | None,
    config: ReplayConfig | None,
) -> Tensor:
    """`replay_step_triton` with the cut of the work given; None picks it by shape."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    B = prompts.shape[0]
    check_rows(q, k, v, g, beta)
    check_records(records_g, records_delta, records_k, H=H, HV=HV, K=K, V=V)
    check_state(recurrent_state, HV=HV, K=K, V=V)
    check_step(N, slots, ancestors, cu_rows, prompts, depths)
    o = torch.empty(N, HV, V, device=v.device, dtype=v.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    depth = ancestors.shape[1]
    config = config or choose_replay(K, V, depth, q.dtype.itemsize)
    blocks_v = V // min(config.block_v, V)
    num_splits = choose_splits(
        N,
        B,
        HV * blocks_v,
        block_w=config.block_w,
        programs_per_sm=config.programs_per_sm,
        device=q.device,
    )
    depth_tile = max(2, triton.next_power_of_2(depth))
    key = records_k if k is None else k
    gated_delta_replay_kernel[(num_splits, HV * blocks_v, B + 1)](
        *(q, key, v, g, beta, recurrent_state, records_g, records_delta, records_k),
        *(slots, ancestors, cu_rows, prompts, depths, o),
        *(N, B, num_splits, K**-0.5 if scale is None else scale),
        *(q.stride(0), q.stride(1), key.stride(0), key.stride(1), v.stride(0), v.stride(1)),
        *(g.stride(0), beta.stride(0), ancestors.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        MAX_DEPTH=depth if config.unroll or depth == 0 else depth_tile,
        DEPTH_TILE=depth_tile,
        BLOCK_W=config.block_w,
        BLOCK_V=V // blocks_v,
        STAGES=config.stages,
        UNROLL=config.unroll,
        PREFETCH=config.prefetch,
        SPLIT_STATE=recurrent_state.dim() == 5,
        KEY_IS_RECORD=k is None,
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
    return o


def choose_replay(K: int, V: int, depth: int, itemsize: int) -> ReplayConfig:
    """The cut for a shape. Both halves of a state block take `4 * K * block_v` bytes of shared memory."""
    return ReplayConfig(block_v=max(16, min(V, 16384 // K)), block_w=32 if K * itemsize <= 512 else 16)
