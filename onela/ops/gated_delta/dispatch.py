"""Which implementation of an op runs: Hopper kernel, portable Triton kernel or reference, as the tensors allow."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops.gated_delta.layer_prefill_reference import gated_delta_layer_prefill_ref
from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.reference import full_state_step_ref, replay_ssm_step_ref, replay_step_ref
from onela.ops.gated_delta.reference import gated_delta_gates as gates_ref
from onela.ops.indexing import RowIndex
from onela.ops.prefill_tables import PrefillTables

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def replay_step(
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
    """One decode step of every beam by projection replay: `replay_step_ref`, by the fastest kernel that can.

    On a GPU: the Hopper kernel where it is one and the case is supported (bf16 rows, K of 128 or 256, V a multiple of
    128, a split state, at most 8 ancestors), else the portable Triton kernel. On a CPU: the reference.

    Args:
        as in `replay_step_ref`.
    Returns:
        o: [N, HV, V].

    Writes, Layout, Padding: as in `replay_step_ref`.
    Aliasing: as in `replay_step_ref`. On a Hopper GPU recurrent_state and the indices are read while the kernel before
        drains: see `replay_step_hopper`.
    Numerics: fp32 accumulation; deterministic; the implementations differ in the order of sums.
    Raises: ShapeError, DtypeError.
    """
    rows = (q, k, v, g, beta)
    step = {
        "recurrent_state": recurrent_state,
        "records_g": records_g,
        "records_delta": records_delta,
        "records_k": records_k,
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    if not _has_kernels(q, v):
        return replay_step_ref(*rows, **step, scale=scale, out_dtype=out_dtype)
    # Imported here: a machine without a GPU need not have triton.
    from onela.ops.gated_delta.replay import replay_step_triton
    from onela.ops.gated_delta.replay_hopper import replay_step_hopper, supports_hopper

    supported = supports_hopper(
        *rows,
        recurrent_state=recurrent_state,
        records_g=records_g,
        records_delta=records_delta,
        records_k=records_k,
        ancestors=ancestors,
        prompts=prompts,
        out_dtype=out_dtype,
    )
    kernel = replay_step_hopper if supported else replay_step_triton
    return kernel(*rows, **step, scale=scale, out_dtype=out_dtype)


def gated_delta_layer_step(
    mixed_qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    recurrent_state: Tensor,
    conv_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    records_x: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
) -> Tensor:
    """The decode step of a whole layer: `gated_delta_layer_step_ref`, fused where a kernel can.

    Args, Returns, Writes, Layout, Padding, Aliasing, Numerics: as in `gated_delta_layer_step_ref`.
    Raises: ShapeError, DtypeError.
    """
    index: RowIndex = {
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    layer = {
        "conv_weight": conv_weight,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "recurrent_state": recurrent_state,
        "conv_state": conv_state,
        "records_g": records_g,
        "records_delta": records_delta,
        "records_k": records_k,
        "records_x": records_x,
    }
    alike = mixed_qkv.dtype == records_x.dtype == records_k.dtype == z.dtype
    if alike and _has_kernels(records_k, records_delta) and mixed_qkv.is_cuda:
        from onela.ops.gated_delta.layer_step import gated_delta_layer_step_triton

        return gated_delta_layer_step_triton(mixed_qkv, z, b, a, norm_eps=norm_eps, **layer, **index)
    return gated_delta_layer_step_ref(mixed_qkv, z, b, a, norm_eps=norm_eps, **layer, **index)


def gated_delta_gates(
    a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, round_beta: bool = False
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength from the raw gate inputs: the reference's, in one launch on a GPU."""
    if a.is_cuda and a.dim() == 2 and a.dtype in FLOATS:
        from onela.ops.gated_delta.gates import gated_delta_gates_triton

        return gated_delta_gates_triton(a, b, A_log=A_log, dt_bias=dt_bias, round_beta=round_beta)
    return gates_ref(a, b, A_log=A_log, dt_bias=dt_bias, round_beta=round_beta)


def full_state_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    states: Tensor,
    recurrent_state: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    row_prompts: Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One decode step with a whole state per beam: `full_state_step_ref`, by its kernel on a GPU."""
    step = {
        "states": states,
        "recurrent_state": recurrent_state,
        "read_rows": read_rows,
        "write_rows": write_rows,
        "row_prompts": row_prompts,
    }
    if _has_kernels(q, v):
        from onela.ops.gated_delta.full_state import full_state_step_triton

        return full_state_step_triton(q, k, v, g, beta, **step, scale=scale, out_dtype=out_dtype)
    return full_state_step_ref(q, k, v, g, beta, **step, scale=scale, out_dtype=out_dtype)


def replay_ssm_step(
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
    """One decode step from checkpoints and buffers: `replay_ssm_step_ref`, by its kernel on a GPU."""
    step = {
        "checkpoints": checkpoints,
        "checkpoint_rows": checkpoint_rows,
        "buffer_g": buffer_g,
        "buffer_delta": buffer_delta,
        "buffer_k": buffer_k,
        "rows": rows,
        "row_depths": row_depths,
    }
    if _has_kernels(q, v):
        from onela.ops.gated_delta.replay_ssm import replay_ssm_step_triton

        return replay_ssm_step_triton(q, k, v, g, beta, **step, scale=scale, out_dtype=out_dtype)
    return replay_ssm_step_ref(q, k, v, g, beta, **step, scale=scale, out_dtype=out_dtype)


def _has_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether Triton's kernels take these rows: on a GPU, a known dtype, head sizes a power of two from 16 to 512."""
    sizes = all(16 <= size <= 512 and not size & (size - 1) for size in (q.shape[-1], v.shape[-1]))
    return q.is_cuda and q.dtype in FLOATS and sizes


def gated_delta_layer_prefill(
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    prompts: Tensor,
    cached_lens: Tensor,
    tables: PrefillTables | None = None,
    round_steps: bool = False,
) -> Tensor:
    """`gated_delta_layer_prefill_ref`; with tables on a GPU and 16-bit rows, by chunked kernels, which round no steps.

    Args, Returns, Writes: as in `gated_delta_layer_prefill_ref`.
    Padding: with tables, the tokens behind the last prompt are computed and go nowhere.
    Numerics: as in the implementation that runs; both are deterministic.
    Raises: ShapeError, DtypeError.
    """
    weights = {"conv_weight": conv_weight, "A_log": A_log, "dt_bias": dt_bias}
    states = {"recurrent_state": recurrent_state, "conv_state": conv_state}
    if tables is not None and mixed_qkv.is_cuda and not round_steps:
        from onela.ops.gated_delta.layer_prefill import gated_delta_layer_prefill_chunked, supports

        if supports(mixed_qkv, recurrent_state):
            return gated_delta_layer_prefill_chunked(mixed_qkv, b, a, **weights, **states, tables=tables)
    return gated_delta_layer_prefill_ref(
        mixed_qkv,
        b,
        a,
        **weights,
        **states,
        cu_seqlens=cu_seqlens,
        prompts=prompts,
        cached_lens=cached_lens,
        tables=tables,
        round_steps=round_steps,
    )
