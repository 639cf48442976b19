"""Plain PyTorch references of every Gated DeltaNet op.

One head's state is `S` [V, K]; `alpha = exp(g)`; `q`, `k` are l2-normalised and `q` is scaled by `K**-0.5`:

    delta_t = beta_t (v_t - alpha_t S_{t-1} k_t)
    S_t     = alpha_t S_{t-1} + delta_t k_t^T
    o_t     = S_t q_t

Arithmetic is fp32 whatever the inputs' dtype, fp64 for fp64 inputs: then a reference is its own witness.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.ops._checks import check_float, check_groups, check_index
from onela.ops._dtypes import compute_dtype
from onela.ops.indexing import gather_rows, scatter_rows, spread

L2NORM_EPS = 1e-6


def l2norm_scale(x: Tensor) -> Tensor:
    """`1 / sqrt(sum(x**2) + 1e-6)` over the last axis, kept as an axis of size one."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def gated_delta_gates(
    a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, round_beta: bool = False
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength from the raw gate inputs.

    `g = -exp(A_log) softplus(a + dt_bias)` (never positive), `beta = sigmoid(b)`.

    Args:
        a, b: [..., HV] raw projections.
        A_log, dt_bias: [HV].
        round_beta: round the write strength to b's dtype.
    Returns:
        g, beta: [..., HV] fp32.
    """
    dtype = compute_dtype(a)
    g = -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))
    beta = b.to(dtype).sigmoid()
    return g, beta.to(b.dtype).to(dtype) if round_beta else beta


def split_state(recurrent_state: Tensor) -> Tensor:
    """Split an fp32 state into two bf16 halves whose sum is the state to about 16 bits of mantissa.

    Args:
        recurrent_state: [..., V, K] fp32.
    Returns:
        [..., 2, V, K] bf16: the rounded state, and what rounding left over.
    """
    high = recurrent_state.to(torch.bfloat16)
    low = (recurrent_state - high.to(torch.float32)).to(torch.bfloat16)
    return torch.stack([high, low], dim=-3)


def merge_state(split: Tensor) -> Tensor:
    """The inverse of `split_state`: [..., 2, V, K] bf16 -> [..., V, K] fp32."""
    return split.to(torch.float32).sum(dim=-3)


def gated_delta_recurrent_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run packed sequences token by token: the definition that everything else is held against.

    Args:
        q, k: [T, H, K]; not normalised, the op does it.
        v: [T, HV, V].
        g, beta: [T, HV].
        cu_seqlens: [N+1] int32; sequence `n` is `cu_seqlens[n] : cu_seqlens[n+1]`, and may be empty.
        initial_state: [N, HV, V, K] or None for zeros.
        scale: factor on the normalised q; None means `K**-0.5`.
    Returns:
        o: [T, HV, V] in v's dtype.
        final_state: [N, HV, V, K] fp32 (fp64 for fp64 inputs).
    """
    T, H, K = q.shape
    HV, V = v.shape[1:]
    groups = check_groups(HV, H)
    check_index("cu_seqlens", cu_seqlens, None)
    num_sequences = cu_seqlens.shape[0] - 1
    dtype = compute_dtype(q)
    q, k = (x.to(dtype) for x in (q, k))
    q = (q * l2norm_scale(q) * (K**-0.5 if scale is None else scale)).repeat_interleave(groups, 1)
    k = (k * l2norm_scale(k)).repeat_interleave(groups, 1)
    o = torch.empty(T, HV, V, dtype=dtype, device=q.device)
    final = torch.zeros(num_sequences, HV, V, K, dtype=dtype, device=q.device)
    if initial_state is not None:
        final.copy_(initial_state)
    bounds = cu_seqlens.tolist()
    for n in range(num_sequences):
        state = final[n]
        for t in range(bounds[n], bounds[n + 1]):
            state = state * g[t].to(dtype).exp()[:, None, None]
            projected = torch.einsum("hvk,hk->hv", state, k[t])
            delta = beta[t].to(dtype)[:, None] * (v[t].to(dtype) - projected)
            state = state + delta[:, :, None] * k[t][:, None, :]
            o[t] = torch.einsum("hvk,hk->hv", state, q[t])
        final[n] = state
    return o.to(v.dtype), final


def replay_step_ref(
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
    """One decode step of every beam by projection replay: the records of its ancestors, and no state.

    With `x` the normalised q or k:  u(-1) = S x;  u(j) = alpha_j u(j-1) + delta_j (k_j . x),  0 <= j < t;
    delta_t = beta_t (v_t - alpha_t u_k);  o_t = alpha_t u_q + delta_t (k_t . q_t).

    The key record is the untouched input row, and the delta record is `delta * l2norm_scale(k)`: the product
    of the two is what replay needs, and the key stays exact in the dtype it came in.

    Args:
        q, k: [N, H, K]; not normalised. k may be None: then it already lies in `records_k[slots]`.
        v: [N, HV, V].
        g, beta: [N, HV] fp32.
        recurrent_state: [num_prompts, HV, V, K] fp32, or [num_prompts, HV, 2, V, K] bf16 from `split_state`.
        records_g: [num_slots, HV] fp32. records_delta: [num_slots, HV, V]. records_k: [num_slots, H, K].
        slots: [N] int32, where each row's record is written; PAD for a padding row.
        ancestors: [N, D] int32 slots, oldest first; entries from the request's depth on are PAD.
        cu_rows: [B+1] int32, rows of each request. prompts: [B] int32. depths: [B] int32, 0 <= depth <= D.
        scale: factor on the normalised q; None means `K**-0.5`.
        out_dtype: dtype of the output; None means v's.
    Returns:
        o: [N, HV, V].

    Writes: records_g, records_delta and (unless k is None) records_k at `slots`.
    Layout: the last axis of every tensor is contiguous; rows of q, k, v may be strided.
    Padding: rows whose slot is PAD, and rows past `cu_rows[-1]`, read and write nothing and give zeros.
    Aliasing: ancestors may repeat between rows; no slot that is written is read as an ancestor in the same launch.
    Numerics: fp32 accumulation; deterministic; a row does not depend on the other rows.
    Raises: ShapeError, DtypeError.
    """
    N, H, K = q.shape
    HV, V = v.shape[1:]
    groups = check_groups(HV, H)
    check_float("v", v, N, HV, V)
    check_float("g", g, N, HV)
    check_float("beta", beta, N, HV)
    check_float("records_delta", records_delta, None, HV, V)
    check_float("records_k", records_k, None, H, K)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("prompts", prompts, cu_rows.shape[0] - 1)
    check_index("depths", depths, cu_rows.shape[0] - 1)
    if recurrent_state.dim() == 5:
        recurrent_state = merge_state(recurrent_state)
    check_float("recurrent_state", recurrent_state, None, HV, V, K)
    dtype = compute_dtype(q)
    live = (slots >= 0) & (spread(prompts, cu_rows, N) >= 0)
    if k is None:
        k = gather_rows(records_k, slots)
    else:
        scatter_rows(records_k, slots.where(live, slots.new_full((), -1)), k)
    qn, kn = q.to(dtype), k.to(dtype)
    k_scale = l2norm_scale(kn)
    qn = qn * l2norm_scale(qn) * (K**-0.5 if scale is None else scale)
    kn = kn * k_scale

    def per_value_head(x: Tensor) -> Tensor:
        """[N, H] -> [N, HV, 1]."""
        return (x if groups == 1 else x.repeat_interleave(groups, 1))[..., None]

    # What the chain of ancestors has made of each projection so far: [N, HV, V].
    u_q, u_k = _project_states(qn, kn, recurrent_state, cu_rows.tolist(), prompts.tolist())
    for j in range(ancestors.shape[1]):
        slot = ancestors[:, j].where(live, ancestors.new_full((), -1))
        key = gather_rows(records_k, slot).to(dtype)
        decay = gather_rows(records_g, slot).to(dtype).exp()[..., None]
        delta = gather_rows(records_delta, slot).to(dtype)
        for u, x in ((u_q, qn), (u_k, kn)):
            u.mul_(decay).addcmul_(delta, per_value_head((key * x).sum(-1)))
    alpha = g.to(dtype).exp()[..., None]
    delta = beta.to(dtype)[..., None] * (v.to(dtype) - alpha * u_k)
    o = (alpha * u_q).addcmul_(delta, per_value_head((qn * kn).sum(-1)))
    target = slots.where(live, slots.new_full((), -1))
    scatter_rows(records_g, target, g)
    scatter_rows(records_delta, target, delta * per_value_head(k_scale[..., 0]))
    return o.masked_fill_(~live[:, None, None], 0).to(v.dtype if out_dtype is None else out_dtype)


def _project_states(
    q: Tensor, k: Tensor, states: Tensor, bounds: list[int], prompts: list[int]
) -> tuple[Tensor, Tensor]:
    """`S q` and `S k` [N, HV, V] of every row, S its prompt's state; zeros for rows without a prompt.

    One product with a prompt's state for all beams of the request, which is read where it lies.
    """
    N = q.shape[0]
    HV, V = states.shape[1:3]
    groups = HV // q.shape[1]
    both = [q.new_zeros(HV, N, V) for _ in range(2)]
    for r, p in enumerate(prompts):
        rows = slice(bounds[r], bounds[r + 1])
        if p < 0 or rows.start == rows.stop:
            continue
        state = states[p].to(q.dtype).transpose(-1, -2)
        for u, x in zip(both, (q, k)):
            xs = x[rows].transpose(0, 1)
            u[:, rows] = (xs if groups == 1 else xs.repeat_interleave(groups, 0)) @ state
    return both[0].transpose(0, 1), both[1].transpose(0, 1)


def full_state_step_ref(
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
    """One decode step with a whole state per beam: what ordinary engines do.

    Args:
        q, k: [N, H, K]; not normalised. v: [N, HV, V]. g, beta: [N, HV] fp32.
        states: [num_rows, HV, V, K] fp32 or bf16.
        recurrent_state: [num_prompts, HV, V, K] fp32, read where `read_rows` is PAD.
        read_rows: [N] int32, row of `states` that holds the parent's state; PAD: the prompt's.
        write_rows: [N] int32, row of `states` that takes the new state; PAD for a padding row.
        row_prompts: [N] int32.
        scale, out_dtype: as in `replay_step_ref`.
    Returns:
        o: [N, HV, V].

    Writes: states at `write_rows`.
    Padding: rows whose `write_rows` is PAD read and write nothing and give zeros.
    Aliasing: `read_rows == write_rows` updates in place; otherwise no row that is written is read in the same launch.
        `read_rows` may repeat.
    Numerics: fp32 arithmetic, rounded to the states' dtype when stored; deterministic.
    """
    N, H, K = q.shape
    HV, V = v.shape[1:]
    groups = check_groups(HV, H)
    check_float("states", states, None, HV, V, K)
    check_float("recurrent_state", recurrent_state, None, HV, V, K)
    for name, index in (("read_rows", read_rows), ("write_rows", write_rows), ("row_prompts", row_prompts)):
        check_index(name, index, N)
    dtype = compute_dtype(q)
    live = write_rows >= 0
    qn, kn = q.to(dtype), k.to(dtype)
    qn = (qn * l2norm_scale(qn) * (K**-0.5 if scale is None else scale)).repeat_interleave(groups, 1)
    kn = (kn * l2norm_scale(kn)).repeat_interleave(groups, 1)
    from_prompt = gather_rows(recurrent_state, row_prompts.where(live, row_prompts.new_full((), -1)))
    from_parent = gather_rows(states, read_rows)
    parent = torch.where((read_rows >= 0)[:, None, None, None], from_parent.to(dtype), from_prompt.to(dtype))
    state, o = _state_step(parent, qn, kn, v.to(dtype), g.to(dtype), beta.to(dtype))
    scatter_rows(states, write_rows, state)
    return o.masked_fill(~live[:, None, None], 0).to(v.dtype if out_dtype is None else out_dtype)


def replay_ssm_step_ref(
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
    """One decode step that rebuilds every beam's state from a checkpoint and a buffer of its own past transitions.

    The state is built, read once and dropped; only the new transition is written.

    Args:
        q, k: [N, H, K]; not normalised. v: [N, HV, V]. g, beta: [N, HV] fp32.
        checkpoints: [num_checkpoints, HV, V, K] fp32 or bf16; one per beam, or one per prompt when shared.
        checkpoint_rows: [N] int32, the checkpoint of each row.
        buffer_g: [num_rows, T, HV] fp32. buffer_delta: [num_rows, T, HV, V]. buffer_k: [num_rows, T, H, K].
        rows: [N] int32, the buffer row of each beam; PAD for a padding row.
        row_depths: [N] int32, transitions already in the buffer, less than T.
        scale, out_dtype: as in `replay_step_ref`.
    Returns:
        o: [N, HV, V].

    Writes: the buffers at `[rows, row_depths]`, in the same form as `replay_step_ref`'s records.
    Padding: rows that are PAD read and write nothing and give zeros.
    Aliasing: `rows` must not repeat; `checkpoint_rows` may.
    Numerics: fp32 arithmetic; deterministic.
    """
    N, H, K = q.shape
    HV, V = v.shape[1:]
    T = buffer_g.shape[1]
    groups = check_groups(HV, H)
    check_float("checkpoints", checkpoints, None, HV, V, K)
    check_float("buffer_delta", buffer_delta, None, T, HV, V)
    check_float("buffer_k", buffer_k, None, T, H, K)
    for name, index in (("checkpoint_rows", checkpoint_rows), ("rows", rows), ("row_depths", row_depths)):
        check_index(name, index, N)
    dtype = compute_dtype(q)
    out_dtype = v.dtype if out_dtype is None else out_dtype
    live = rows >= 0
    qn, kn = q.to(dtype), k.to(dtype)
    k_scale = l2norm_scale(kn).repeat_interleave(groups, 1)
    qn = (qn * l2norm_scale(qn) * (K**-0.5 if scale is None else scale)).repeat_interleave(groups, 1)
    kn = kn.repeat_interleave(groups, 1) * k_scale
    state = gather_rows(checkpoints, checkpoint_rows.where(live, checkpoint_rows.new_full((), -1))).to(dtype)
    for j in range(T):
        index = rows.where(row_depths > j, rows.new_full((), -1))
        decay = gather_rows(buffer_g[:, j], index).to(dtype).exp()
        key = gather_rows(buffer_k[:, j], index).to(dtype).repeat_interleave(groups, 1)
        delta = gather_rows(buffer_delta[:, j], index).to(dtype)
        state = decay[:, :, None, None] * state + delta[..., :, None] * key[..., None, :]
    v, g, beta = v.to(dtype), g.to(dtype), beta.to(dtype)
    projected = g.exp()[..., None] * torch.einsum("nhvk,nhk->nhv", state, kn)
    delta = beta[..., None] * (v - projected)
    o = g.exp()[..., None] * torch.einsum("nhvk,nhk->nhv", state, qn) + delta * (kn * qn).sum(
        -1, keepdim=True
    )
    at, depth = rows[live].to(torch.int64), row_depths[live].to(torch.int64)
    buffer_g[at, depth] = g[live].to(buffer_g.dtype)
    buffer_delta[at, depth] = (delta * k_scale)[live].to(buffer_delta.dtype)
    buffer_k[at, depth] = k[live].to(buffer_k.dtype)
    return o.masked_fill(~live[:, None, None], 0).to(out_dtype)


def _state_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The three lines at the top of this file, for rows of states [N, HV, V, K]."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - torch.einsum("nhvk,nhk->nhv", state, k))
    state = state + delta[..., :, None] * k[..., None, :]
    return state, torch.einsum("nhvk,nhk->nhv", state, q)
