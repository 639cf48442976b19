"""Projection replay for Hopper (sm_90): the choice of tiles around the Gluon kernel, and what it supports."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from onela.errors import DtypeError, ShapeError, UnavailableError
from onela.ops._checks import check_float, check_groups, check_index, check_shape
from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.gated_delta._replay_hopper_kernel import gated_delta_replay_hopper_kernel

logger = logging.getLogger(__name__)

MAX_DEPTH = 8
MAX_REQUESTS = 1024
HEAD_SIZES_K = (128, 256)


@dataclass(frozen=True)
class HopperConfig:
    """How the rows are cut.

    Args:
        num_warps: 4 (tiles of 32 rows, two programs on a multiprocessor at K = 128) or 8 (tiles of 64, one program).
        ring: stages of `[8 * num_warps, 128]` in flight.
        splits: programs per average request, head and 128 columns.
        overlap: begin while the kernel before drains: state and indices are loaded then, all else after it has ended.
    """

    num_warps: int = 4
    ring: int = 6
    splits: int = 1
    overlap: bool = True


def supports_hopper(
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
    ancestors: Tensor,
    prompts: Tensor,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """Whether `replay_step_hopper` takes these tensors. Only looks at devices, dtypes, shapes and strides."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if not has_wgmma(q.device):
        return False
    sizes = q.shape[-1] in HEAD_SIZES_K and v.shape[-1] % 128 == 0
    sizes = sizes and prompts.shape[0] <= MAX_REQUESTS
    if sizes and ancestors.shape[1] > MAX_DEPTH:
        _say_portable()
        return False
    dtypes = recurrent_state.dim() == 5 and recurrent_state.dtype == records_k.dtype == bf16
    dtypes = dtypes and g.dtype == beta.dtype == records_g.dtype == fp32
    dtypes = dtypes and records_delta.dtype in (bf16, fp32) and (out_dtype or v.dtype) in (bf16, fp32)
    dtypes = dtypes and all(x.dtype == bf16 for x in (q, k, v) if x is not None)
    rows = all(rows_readable(x) for x in (q, k, v) if x is not None)
    return bool(sizes and dtypes and rows and g.stride(-1) == beta.stride(-1) == 1)


@lru_cache(maxsize=1)
def _say_portable() -> None:
    """Said once: the times of long SIDs are those of another kernel."""
    logger.info("more than %d ancestors: replayed by the portable kernel, not by Hopper's", MAX_DEPTH)


def replay_step_hopper(
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
    """One decode step of every beam by projection replay, on a Hopper GPU: `replay_step_ref` in one kernel.

    The kernel is compiled for `ancestors.shape[1]` ancestors. A request of a smaller depth has PAD entries: they cost
    no traffic, but some arithmetic.

    Args:
        q, k: [N, H, K] bf16, K of 128 or 256; not normalised. k may be None: then it already lies in
            `records_k[slots]`.
        v: [N, HV, V] bf16; V is a multiple of 128.
        g, beta: [N, HV] fp32.
        recurrent_state: [num_prompts, HV, 2, V, K] bf16 from `split_state`.
        records_g: [num_slots, HV] fp32. records_delta: [num_slots, HV, V] bf16 or fp32.
        records_k: [num_slots, H, K] bf16.
        slots: [N] int32 or int64, where each row's record is written; PAD for a padding row.
        ancestors: [N, D] int32 or int64 slots, oldest first; D is at most 8; PAD from the request's depth on.
        cu_rows: [B+1] int32. prompts: [B] int32; B is at most 1024. depths: [B] int32, not read: PAD says as much.
        scale: factor on the normalised q; None means `K**-0.5`.
        out_dtype: bf16 or fp32; None means v's.
    Returns:
        o: [N, HV, V].

    Writes: records_g, records_delta and (unless k is None) records_k at `slots`.
    Layout: state and records are contiguous; rows of q, k and v are contiguous in themselves, and may lie apart by a
        multiple of 16 elements.
    Padding: rows whose slot is PAD, of a prompt that is PAD, or past `cu_rows[-1]`, read and write nothing and give
        zeros.
    Aliasing: ancestors may repeat between rows; no slot that is written is read as an ancestor in the same launch.
        recurrent_state and all indices are read while the kernel launched before drains (programmatic dependent
        launch): some other kernel must stand between the one that wrote them and this one, or the unbroken row of
        replays that this one ends. Every other tensor may come from the kernel before.
    Numerics: fp32 accumulation; the state as hi + lo, about 16 bits of mantissa; deterministic; a row does not depend
        on the other rows.
    Raises: ShapeError, DtypeError, UnavailableError (no Hopper GPU).
    """
    return launch_hopper(
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
    )


def launch_hopper(
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
    write_records: bool = True,
    norm: tuple[Tensor, Tensor, float] | None = None,
    config: HopperConfig | None = None,
) -> Tensor:
    """`replay_step_hopper` with what a layer and a benchmark want besides.

    `write_records` off leaves out the records that nobody will read. `norm` is a gate [N, HV*V] of rows like v's, a
    weight [V] and an epsilon: the output is then normalised and gated before it is stored; V must be 128. `config`
    is the cut of the rows; None picks it.
    """
    N, H, K = q.shape
    HV, V = v.shape[1:]
    B = prompts.shape[0]
    T = ancestors.shape[1]
    check_groups(HV, H)
    if k is not None:
        check_shape("k", k, N, H, K)
    check_shape("v", v, N, HV, V)
    check_float("g", g, N, HV)
    check_float("beta", beta, N, HV)
    check_float("recurrent_state", recurrent_state, None, HV, 2, V, K)
    check_float("records_g", records_g, None, HV)
    check_float("records_delta", records_delta, None, HV, V)
    check_float("records_k", records_k, None, H, K)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("cu_rows", cu_rows, B + 1)
    check_index("prompts", prompts, B)
    check_index("depths", depths, B)
    _refuse(q, k, v, g, beta, recurrent_state, records_g, records_delta, records_k, T, B)
    o = torch.empty(N, HV, V, device=v.device, dtype=v.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    z, norm_weight, norm_eps = (v, v, 0.0) if norm is None else norm
    if norm is not None:
        check_shape("norm", z, N, HV * V)
        check_shape("norm", norm_weight, 128)
        _refuse_rows("norm", z.unflatten(1, (HV, V)))
    wide = records_delta.element_size() == 4
    stages = stages_of_tile(K, T, wide) + (norm is not None)
    if config is None:
        config = choose_hopper(N, B, HV, K, V, stages, multiprocessors(q.device))
    rows = rows_per_program(N, B, config)
    key = records_k if k is None else k
    gated_delta_replay_hopper_kernel[(triton.cdiv(N, rows) * HV * (V // 128),)](
        *(q, key, v, g, beta, recurrent_state, records_g, records_delta, records_k),
        *(slots, ancestors, cu_rows, prompts, z, norm_weight, o),
        *(N, B, rows, K**-0.5 if scale is None else scale, norm_eps),
        *(
            q.stride(0),
            key.stride(0),
            v.stride(0),
            z.stride(0),
            g.stride(0),
            beta.stride(0),
            ancestors.stride(0),
        ),
        H=H,
        HV=HV,
        K=K,
        V=V,
        T=T,
        BPAD=max(32, triton.next_power_of_2(B)),
        NW=config.num_warps,
        RING=min(config.ring, 2 * stages),
        RAW=k is None,
        WRITE=write_records,
        NORM=norm is not None,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        launch_pdl=config.overlap,
    )
    return o


def rows_per_program(N: int, B: int, config: HopperConfig) -> int:
    """Rows of one program. A request of average width is cut into `splits` equal programs."""
    average = triton.cdiv(N, max(B, 1))
    return int(triton.cdiv(average, config.splits))


def stages_of_tile(K: int, T: int, wide: bool) -> int:
    """Ring stages that one tile takes: q, k, then T keys and deltas, then v. `wide`: deltas are fp32."""
    return (2 + T) * (K // 128) + T * (2 if wide else 1) + 1


@lru_cache(maxsize=4096)
def choose_hopper(
    N: int, B: int, HV: int, K: int, V: int, stages: int, processors: int, stored: int = 2
) -> HopperConfig:
    """The cut with the least bytes to move one after the other: a program's tiles and states, times the waves.

    `stages` of a tile are read and `stored` are written: the output and the new delta.
    """
    num_warps, together = (4, 2) if K == 128 else (8, 1)
    BW = 8 * num_warps
    # Measured: when a tile's stages are one less than a multiple of the ring, the step takes up to 20 % longer.
    ring = 5 if stages % 6 == 5 else 6
    tile = BW * 256 * (stages + stored)
    state = 4 * 128 * K
    average = triton.cdiv(N, max(B, 1))
    best = (float("inf"), HopperConfig(num_warps=num_warps, ring=ring))
    for splits in range(1, triton.cdiv(average, BW) + 1):
        config = HopperConfig(num_warps=num_warps, ring=ring, splits=splits)
        rows = rows_per_program(N, B, config)
        waves = triton.cdiv(triton.cdiv(N, rows) * HV * (V // 128), together * processors)
        # A program that begins in the middle of a request and ends in the next loads two states.
        requests = 1 if B <= 1 or average % rows == 0 else 2
        cost = waves * ((triton.cdiv(rows, BW) + requests - 1) * tile + requests * state)
        if cost < best[0]:
            best = (cost, config)
    chosen = best[1]
    programs = triton.cdiv(N, rows_per_program(N, B, chosen)) * HV * (V // 128)
    if num_warps == 4 and 2 * programs <= processors:
        # They have a multiprocessor each, and the kernel behind begins on the others: room for more in flight.
        chosen = replace(chosen, ring=max(ring, 8))
    return chosen


def rows_readable(x: Tensor) -> bool:
    """Whether the kernel can copy rows [N, heads, size]: aligned, heads contiguous, a multiple of 16 elements apart."""
    return (
        x.stride(-1) == 1 and x.stride(1) == x.shape[-1] and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    )


def _refuse(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    T: int,
    B: int,
) -> None:
    """Raise for what `replay_step_ref` takes and this kernel does not."""
    if q.shape[-1] not in HEAD_SIZES_K or v.shape[-1] % 128:
        K, V = q.shape[-1], v.shape[-1]
        raise ShapeError(f"q, v: expected K of 128 or 256 and V a multiple of 128, got K = {K} and V = {V}")
    if T > MAX_DEPTH or B > MAX_REQUESTS:
        raise ShapeError(
            f"ancestors, prompts: expected depth <= {MAX_DEPTH} and requests <= {MAX_REQUESTS}, got {T} and {B}"
        )
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, x, allowed in (
        ("q", q, (bf16,)),
        ("k", k, (bf16,)),
        ("v", v, (bf16,)),
        ("g", g, (fp32,)),
        ("beta", beta, (fp32,)),
        ("recurrent_state", recurrent_state, (bf16,)),
        ("records_g", records_g, (fp32,)),
        ("records_delta", records_delta, (bf16, fp32)),
        ("records_k", records_k, (bf16,)),
    ):
        if x is not None and x.dtype not in allowed:
            raise DtypeError(f"{name}: expected {' or '.join(map(str, allowed))}, got {x.dtype}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            _refuse_rows(name, x)
    for name, x in (
        ("recurrent_state", recurrent_state),
        ("records_g", records_g),
        ("records_delta", records_delta),
        ("records_k", records_k),
    ):
        if not x.is_contiguous():
            raise DtypeError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    if not has_wgmma(q.device):
        raise UnavailableError(f"replay_step_hopper: needs a GPU of compute capability 9.0, got {q.device}")


def _refuse_rows(name: str, x: Tensor) -> None:
    if x.dtype != torch.bfloat16 or not rows_readable(x):
        raise DtypeError(
            f"{name}: expected bfloat16 rows of contiguous heads, a multiple of 16 elements apart, got {x.dtype} "
            f"and strides {x.stride()}"
        )
