"""Projection replay as one portable Triton kernel (sm_80 and newer, and Triton's interpreter)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._device import has_wgmma
from onela.ops.gated_delta._checks import check_records, check_rows, check_state, check_step
from onela.ops.gated_delta._launch import INTERPRETED, ReplayConfig, choose_splits
from onela.ops.gated_delta._replay_kernel import MAX_TILE, gated_delta_replay_kernel


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

    Writes, Padding: as in `replay_step_ref`.
    Aliasing: as in `replay_step_ref`. On a Hopper GPU recurrent_state, cu_rows, prompts and depths are read while the
        kernel launched before drains: some other kernel must stand between the one that wrote them and this one, or
        the unbroken row of replays that this one ends.
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
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """`replay_step_triton` with the cut of the work given; None picks it by shape.

    `norm` is a gate [N, HV*V], a weight [V] and an epsilon: the output is then normalised and gated before it is
    stored, which needs a head's whole state in one program.
    """
    N, H, K = q.shape
    HV, V = v.shape[1:]
    B = prompts.shape[0]
    check_rows(q, k, v, g, beta)
    if (records_k if k is None else k).dtype != q.dtype:
        raise DtypeError(f"k: expected q's {q.dtype}, got {(records_k if k is None else k).dtype}")
    check_records(records_g, records_delta, records_k, H=H, HV=HV, K=K, V=V)
    check_state(recurrent_state, HV=HV, K=K, V=V)
    check_step(N, slots, ancestors, cu_rows, prompts, depths)
    o = torch.empty(N, HV, V, device=v.device, dtype=v.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    depth = ancestors.shape[1]
    chosen = config is None
    config = config or choose_replay(K, V, q.dtype, q.device, depth)
    blocks_v = V // min(config.block_v, V)
    num_splits = choose_splits(
        N,
        B,
        HV * blocks_v,
        block_w=config.block_w,
        programs_per_sm=config.programs_per_sm,
        device=q.device,
    )
    # Beyond the largest tile the depth is a loop bound and no more: one compile serves every deeper tree.
    depth_tile = max(2, triton.next_power_of_2(min(depth, MAX_TILE.value + 1)))
    # Programs of few tiles lose more by asking early than they gain.
    prefetch = config.prefetch and not (chosen and 4 * num_splits * config.block_w * max(B, 1) > N)
    gate, norm_weight, norm_eps = norm or (o, o, 0.0)
    if norm is not None and blocks_v > 1:
        raise ShapeError(f"V: a norm over {V} columns needs them in one program, got {blocks_v}")
    key = records_k if k is None else k
    gated_delta_replay_kernel[(num_splits, HV * blocks_v, B + 1)](
        *(q, key, v, g, beta, recurrent_state, records_g, records_delta, records_k),
        *(slots, ancestors, cu_rows, prompts, depths, gate, norm_weight, o),
        *(N, B, num_splits, K**-0.5 if scale is None else scale, norm_eps),
        *(q.stride(0), q.stride(1), key.stride(0), key.stride(1), v.stride(0), v.stride(1)),
        *(g.stride(0), beta.stride(0), gate.stride(0), ancestors.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        MAX_DEPTH=min(depth, 1) * depth_tile,
        DEPTH_TILE=depth_tile,
        BLOCK_W=config.block_w,
        BLOCK_V=V // blocks_v,
        STAGES=config.stages,
        PREFETCH=prefetch,
        SPLIT_STATE=recurrent_state.dim() == 5,
        KEY_IS_RECORD=k is None,
        NORM=norm is not None,
        OVERLAP=config.overlap,
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.overlap else {}),
    )
    return o


def choose_replay(K: int, V: int, dtype: torch.dtype, device: torch.device, depth: int = 1) -> ReplayConfig:
    """The cut for a shape: the largest tile that does not spill. fp32 rows and heads over 128 need more warps; small
    heads, whose warps have little to do each, need fewer."""
    wide = dtype.itemsize > 2
    block_v = max(16, min(V, 16384 // K, 64 if wide else 128))
    hopper = has_wgmma(device)
    if hopper and not wide and K <= 256:
        num_warps = 4 if K <= 128 else 8
        if max(K, V) <= 32:
            block_w, num_warps, programs = (64, 4, 4) if depth else (16, 1, 8)
            return ReplayConfig(
                block_w, block_v, num_warps, prefetch=True, overlap=True, programs_per_sm=programs
            )
        if max(K, V) <= 64:
            return ReplayConfig(32, block_v, 2, prefetch=True, overlap=True, programs_per_sm=4)
        return ReplayConfig(block_w=32, block_v=block_v, num_warps=num_warps, prefetch=True, overlap=True)
    num_warps = 8 if wide or K > 256 else 4
    prefetch = not INTERPRETED
    return ReplayConfig(block_w=16, block_v=block_v, num_warps=num_warps, prefetch=prefetch, overlap=hopper)
