"""Chunked prefill of packed prompts: the recurrence as matrix products over chunks of 64 tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from onela.ops._checks import check_float, check_groups, check_index
from onela.ops._dtypes import compute_dtype
from onela.ops.gated_delta.reference import l2norm_scale
from onela.ops.indexing import device_tensor


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run packed sequences of any lengths through the gated delta rule.

    Inside a chunk with decays `D_ij = exp(G_i - G_j)` (`G` the running sum of g), the deltas solve a unit
    lower-triangular system, `(I + tril(beta k k^T * D, -1)) delta = beta (v - exp(G) S k)`; between chunks
    only the state is carried. (Yang et al., "Gated Delta Networks", 2024, section 3.3.)

    Args:
        q, k: [T, H, K]; not normalised, the op does it. v: [T, HV, V]. g, beta: [T, HV].
        cu_seqlens: [N+1] int32. initial_state: [N, HV, V, K] or None for zeros.
        scale: factor on the normalised q; None means `K**-0.5`.
        chunk_size: tokens per chunk.
    Returns:
        o: [T, HV, V] in v's dtype.
        final_state: [N, HV, V, K] fp32 (fp64 for fp64 inputs).

    Layout: cu_seqlens is read on the host: on the CPU, reading it waits for no device.
    Numerics: fp32 inside. Each sequence is cut at its own start, so a sequence does not depend on the others.
    """
    T, H, K = q.shape
    HV, V = v.shape[1:]
    groups = check_groups(HV, H)
    check_float("k", k, T, H, K)
    check_float("v", v, T, HV, V)
    check_float("g", g, T, HV)
    check_float("beta", beta, T, HV)
    check_index("cu_seqlens", cu_seqlens, None)
    device, dtype = q.device, compute_dtype(q)
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    num_sequences = len(lengths)
    state = torch.zeros(num_sequences, HV, V, K, dtype=dtype, device=device)
    if initial_state is not None:
        check_float("initial_state", initial_state, num_sequences, HV, V, K)
        state.copy_(initial_state)
    if T == 0:
        return torch.empty_like(v), state

    # Chunks of all sequences in one batch: chunk c of every sequence that has one, then chunk c + 1, and so
    # on. A batch of the carried state is then a prefix of the sequences, ordered by length.
    order = sorted(range(num_sequences), key=lambda n: -lengths[n])
    counts = [-(-length // chunk_size) for length in lengths]
    waves = [[n for n in order if counts[n] > c] for c in range(max(counts))]
    starts = device_tensor(
        [bounds[n] + c * chunk_size for c, wave in enumerate(waves) for n in wave], torch.int64, device
    )
    ends = device_tensor([bounds[n + 1] for wave in waves for n in wave], torch.int64, device)
    places = starts[:, None] + torch.arange(chunk_size, device=device)
    inside = places < ends[:, None]
    places = places.where(inside, places.new_full((), T))

    def chunked(x: Tensor) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, chunk_size, ...], zeros past a sequence's end."""
        padded = torch.cat([x.to(dtype), x.new_zeros((1, *x.shape[1:]), dtype=dtype)])
        return padded[places].transpose(1, 2)

    qc, kc = chunked(q), chunked(k)
    qc = qc * l2norm_scale(qc) * (K**-0.5 if scale is None else scale)
    kc = kc * l2norm_scale(kc)
    vc, gc, bc = chunked(v), chunked(g), chunked(beta)

    total = gc.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    gram = (kc @ kc.transpose(-1, -2)).repeat_interleave(groups, 1)
    scores = (qc @ kc.transpose(-1, -2)).repeat_interleave(groups, 1) * decay
    qc, kc = qc.repeat_interleave(groups, 1), kc.repeat_interleave(groups, 1)
    system = gram * decay * bc[..., None]
    right = torch.cat([vc * bc[..., None], kc * (bc * total.exp())[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    delta0, carried = solved.split([V, K], dim=-1)
    q_in = qc * total.exp()[..., None]
    k_out = kc * (total[..., -1:] - total).exp()[..., None]
    last = total[..., -1].exp()[..., None, None]

    out = torch.empty(T + 1, HV, V, dtype=dtype, device=device)
    by_length = device_tensor(order, torch.int64, device)
    sorted_state = state[by_length]
    at = 0
    for wave in waves:
        part = slice(at, at + len(wave))
        at += len(wave)
        current = sorted_state[: len(wave)]
        delta = delta0[part] - carried[part] @ current.transpose(-1, -2)
        o = q_in[part] @ current.transpose(-1, -2) + scores[part] @ delta
        out[places[part]] = o.transpose(1, 2)
        sorted_state[: len(wave)] = current * last[part] + delta.transpose(-1, -2) @ k_out[part]
    state[by_length] = sorted_state
    return out[:T].to(v.dtype), state
