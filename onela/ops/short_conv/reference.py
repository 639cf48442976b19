"""The short causal convolution in front of q, k and v: packed prompts, and one step of every beam."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.ops._checks import check_float, check_index
from onela.ops._dtypes import compute_dtype
from onela.ops.indexing import gather_rows, scatter_rows, spread, to_device


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    round_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over packed sequences, then SiLU.

    `y_t = silu(sum_j weight[:, j] x_{t - (kernel_size - 1) + j})`, inputs before the sequence from `initial_state`.

    Args:
        x: [T, conv_dim], the raw projection.
        weight: [conv_dim, kernel_size].
        cu_seqlens: [N+1] int32.
        initial_state: [N, conv_dim, kernel_size - 1], the inputs that came before, oldest first; None for zeros.
        round_sum: round the sum to x's dtype before the SiLU, which then rounds it again.
    Returns:
        y: [T, conv_dim] in x's dtype.
        final_state: [N, conv_dim, kernel_size - 1] in x's dtype, the last inputs of each sequence.

    Numerics: accumulates in fp32; deterministic; sequences do not touch.
    """
    conv_dim, kernel_size = weight.shape
    check_float("x", x, None, conv_dim)
    tail = kernel_size - 1
    bounds = cu_seqlens.tolist()
    num_sequences = len(bounds) - 1
    if initial_state is None:
        initial_state = x.new_zeros(num_sequences, conv_dim, tail)
    check_float("initial_state", initial_state, num_sequences, conv_dim, tail)
    if num_sequences == 0:
        return torch.empty_like(x), initial_state.to(x.dtype)
    # Every sequence with its own past in front, one after the other: windows that would cross a border are dropped.
    pieces = []
    for n in range(num_sequences):
        pieces += [initial_state[n].t().to(x.dtype), x[bounds[n] : bounds[n + 1]]]
    joined = torch.cat(pieces) if pieces else x
    final_state = torch.stack(
        [joined[bounds[n + 1] + tail * n : bounds[n + 1] + tail * (n + 1)].t() for n in range(num_sequences)]
    )
    if x.shape[0] == 0:
        return torch.empty_like(x), final_state
    dtype = compute_dtype(x)
    # One product per tap: on a CPU `conv1d` compiles code for every length that comes, and keeps a lot of it.
    inputs, taps = joined.to(dtype), weight.to(dtype)
    num_windows = len(joined) - tail
    out = inputs[:num_windows] * taps[:, 0]
    for tap in range(1, kernel_size):
        out.addcmul_(inputs[tap : tap + num_windows], taps[:, tap])
    keep = torch.cat([torch.arange(bounds[n], bounds[n + 1]) + tail * n for n in range(num_sequences)])
    return _silu(out[to_device(keep, out.device)], x.dtype, round_sum), final_state


def _silu(total: Tensor, dtype: torch.dtype, round_sum: bool) -> Tensor:
    """SiLU of the sums in their precision or in `dtype`, which the result has either way."""
    return F.silu(total.to(dtype) if round_sum else total).to(dtype)


def short_conv_step_ref(
    x: Tensor,
    weight: Tensor,
    *,
    conv_state: Tensor,
    records_x: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    round_sum: bool = False,
) -> Tensor:
    """One step of the convolution for every beam: its window is gathered from its ancestors, then the prompt's tail.

    Args:
        x: [N, conv_dim], the raw projection of this step.
        weight: [conv_dim, kernel_size].
        conv_state: [num_prompts, conv_dim, kernel_size - 1], the last inputs of each prompt, oldest first.
        records_x: [num_slots, conv_dim], the inputs of earlier steps.
        slots, ancestors, cu_rows, prompts, depths: as in `replay_step_ref`.
        round_sum: as in `short_conv_prefill`.
    Returns:
        y: [N, conv_dim] in x's dtype, after SiLU.

    Writes: records_x at `slots`.
    Padding: rows whose slot is PAD, and rows past `cu_rows[-1]`, read and write nothing and give zeros.
    Aliasing: no slot that is written is read as an ancestor in the same launch.
    Numerics: accumulates in fp32; deterministic.
    """
    N, conv_dim = x.shape
    kernel_size = weight.shape[1]
    check_float("weight", weight, conv_dim, None)
    check_float("conv_state", conv_state, None, conv_dim, kernel_size - 1)
    check_float("records_x", records_x, None, conv_dim)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    dtype = compute_dtype(x)
    taps = weight.to(dtype)
    out = taps[:, -1] * x.to(dtype)
    live = (slots >= 0) & (spread(prompts, cu_rows, N) >= 0)
    bounds = cu_rows.tolist()
    for r, (p, depth) in enumerate(zip(prompts.tolist(), depths.tolist())):
        if p < 0 or bounds[r] == bounds[r + 1]:
            continue
        rows = slice(bounds[r], bounds[r + 1])
        for back in range(1, min(kernel_size - 1, depth) + 1):
            taken = gather_rows(records_x, ancestors[rows, depth - back]).to(dtype)
            out[rows].addcmul_(taken, taps[:, kernel_size - 1 - back])
        if depth < kernel_size - 1:
            # Before the first decode step lies the prompt: its tail is the same for all beams of the request.
            tail = conv_state[p, :, depth:].to(dtype)
            out[rows] += (taps[:, : kernel_size - 1 - depth] * tail).sum(-1)
    if not bool(live.all()):
        out.masked_fill_(~live[:, None], 0)
    scatter_rows(records_x, slots.where(live, slots.new_full((), -1)), x)
    return _silu(out, x.dtype, round_sum)
