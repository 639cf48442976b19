"""The FullState baseline: a whole recurrent state per beam, as ordinary engines keep it.

Copy on reorder: `reorder_states` into a second pool, then `full_state_step_triton` in place. Read-parent: the step
alone, reading the parent's row and writing one's own. A reading row and a writing row of one launch must differ
unless they are the same row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_index, check_shape
from onela.ops.gated_delta._checks import check_layout, check_rows
from onela.ops.gated_delta._full_state_kernel import full_state_step_kernel, reorder_states_kernel


def full_state_step_triton(
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
    """One decode step with a whole state per beam: the contract of `full_state_step_ref`, in one launch.

    Args:
        as in `full_state_step_ref`; floats are bf16, fp16 or fp32; K and V are powers of two from 16 to 512.
    Returns:
        o: [N, HV, V].

    Writes, Padding, Aliasing: as in `full_state_step_ref`.
    Layout: states and recurrent_state are contiguous; rows and heads of q, k and v, and rows of g and beta, may
        be strided.
    Numerics: fp32 arithmetic, rounded to the states' dtype when stored; deterministic.
    Raises: ShapeError, DtypeError.
    """
    return launch_full_state(
        *(q, k, v, g, beta, states, recurrent_state, read_rows, write_rows, row_prompts, scale, out_dtype)
    )


def launch_full_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    recurrent_state: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    row_prompts: Tensor,
    scale: float | None,
    out_dtype: torch.dtype | None,
    *,
    block_v: int | None = None,
    num_warps: int = 1,
) -> Tensor:
    """`full_state_step_triton` with the block of state rows and the warps given; None picks by shape."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    check_rows(q, k, v, g, beta)
    for name, tensor in {"states": states, "recurrent_state": recurrent_state}.items():
        check_float(name, tensor, None, HV, V, K)
        check_layout(name, tensor, contiguous=True)
    for name, tensor in {
        "read_rows": read_rows,
        "write_rows": write_rows,
        "row_prompts": row_prompts,
    }.items():
        check_index(name, tensor, N)
        check_layout(name, tensor, contiguous=True)
    o = torch.empty(N, HV, V, device=v.device, dtype=v.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    block_v = min(V, block_v or max(4, 2048 // K))
    full_state_step_kernel[(N * HV * (V // block_v),)](
        *(q, k, v, g, beta, states, recurrent_state, read_rows, write_rows, row_prompts, o),
        K**-0.5 if scale is None else scale,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(g.stride(0), beta.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
    return o


def reorder_states(states: Tensor, parents: Tensor, *, out: Tensor) -> Tensor:
    """Copy every surviving beam's state to its new row: `out[n] = states[parents[n]]`.

    Args:
        states: [num_rows, ...], any dtype.
        parents: [N] int32, row of `states` that row `n` of `out` takes; PAD leaves the row as it is.
        out: [at least N, ...] of the same row shape and dtype; another tensor than `states`.
    Returns:
        out.

    Writes: the first N rows of out.
    Layout: states and out are contiguous.
    Padding: a PAD parent writes nothing.
    Aliasing: parents may repeat; states and out must not overlap.
    Raises: ShapeError, DtypeError.
    """
    check_index("parents", parents, None)
    check_shape("out", out, None, *states.shape[1:])
    if out.dtype != states.dtype:
        raise DtypeError(f"out: expected {states.dtype}, got {out.dtype}")
    check_layout("parents", parents, contiguous=True)
    check_layout("states", states, contiguous=True)
    check_layout("out", out, contiguous=True)
    check_shape("out", out[: parents.shape[0]], parents.shape[0], *states.shape[1:])
    row_size = states[0].numel() if states.shape[0] else 0
    if parents.shape[0] == 0 or row_size == 0:
        return out
    block = 8192
    reorder_states_kernel[(parents.shape[0], -(-row_size // block))](
        states, out, parents, row_size, BLOCK=block, num_warps=8
    )
    return out
