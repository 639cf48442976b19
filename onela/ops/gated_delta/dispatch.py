"""Which implementation of replay runs: Hopper kernel, portable Triton kernel or reference, as the tensors allow."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.ops.gated_delta.reference import replay_step_ref


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

    Writes, Layout, Padding, Aliasing: as in `replay_step_ref`.
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
    if not q.is_cuda:
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
