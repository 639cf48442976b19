"""Prefill of packed prompts through a Gated DeltaNet layer, from its raw in-projection to the input of its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float, check_groups, check_index
from onela.ops.gated_delta.prefill import gated_delta_prefill
from onela.ops.gated_delta.reference import gated_delta_gates, merge_state, split_state
from onela.ops.indexing import to_device
from onela.ops.prefill_tables import PrefillTables
from onela.ops.short_conv.reference import short_conv_prefill


def layer_sizes(mixed_qkv: Tensor, a: Tensor, recurrent_state: Tensor) -> tuple[int, int, int, int]:
    """H, HV, K and V of a layer by its tensors. Raises ShapeError when they do not fit together."""
    HV = a.shape[-1]
    V, K = recurrent_state.shape[-2:]
    rest = mixed_qkv.shape[-1] - HV * V
    if rest <= 0 or rest % (2 * K):
        raise ShapeError(
            f"mixed_qkv: {mixed_qkv.shape[-1]} channels are not 2 * H * {K} + {HV} * {V} for any H"
        )
    H = rest // (2 * K)
    check_groups(HV, H)
    return H, HV, K, V


def gated_delta_layer_prefill_ref(
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
    """Short convolution, SiLU, gates and recurrence of new tokens of several prompts, each after what it holds already.

    Args:
        mixed_qkv: [T, 2*H*K + HV*V], the raw projection: q heads, then k heads, then v heads.
        b, a: [T, HV], raw write strength and raw decay.
        conv_weight: [2*H*K + HV*V, kernel_size]. A_log, dt_bias: [HV].
        recurrent_state: [num_prompts, HV, V, K] fp32, or its split form [num_prompts, HV, 2, V, K] bf16.
        conv_state: [num_prompts, 2*H*K + HV*V, kernel_size - 1].
        cu_seqlens: [B+1] int32, new tokens of each prompt. prompts: [B] int32, places of their states, or PAD.
        cached_lens: [B] int32, tokens that each holds already; with none, its states are not read.
        tables: the same on the device, for a kernel; not read here.
        round_steps: round the convolution's sum and the write strength to the rows' dtype, as a chain of 16-bit ops.
    Returns:
        o: [T, HV, V] in mixed_qkv's dtype.

    Writes: recurrent_state and conv_state at the prompts that have new tokens.
    Padding: a sequence whose place is PAD begins with nothing and is kept nowhere.
    Layout: rows of mixed_qkv, b and a may be strided; cu_seqlens, prompts and cached_lens are read on the host.
    Aliasing: no place occurs twice.
    Numerics: fp32 inside; a sequence does not depend on the others.
    Raises: ShapeError, DtypeError.
    """
    T, C = mixed_qkv.shape
    H, HV, K, V = layer_sizes(mixed_qkv, a, recurrent_state)
    check_float("b", b, T, HV)
    check_float("conv_weight", conv_weight, C, None)
    check_float("conv_state", conv_state, None, C, conv_weight.shape[1] - 1)
    check_index("prompts", prompts, cu_seqlens.shape[0] - 1)
    check_index("cached_lens", cached_lens, cu_seqlens.shape[0] - 1)
    split = recurrent_state.dim() == 5
    kept = to_device(((prompts >= 0) & (cu_seqlens.diff() > 0)).nonzero()[:, 0], mixed_qkv.device)
    places = to_device(prompts.to(torch.int64).clamp(min=0), mixed_qkv.device)
    fresh = to_device((cached_lens == 0) | (prompts < 0), mixed_qkv.device)
    # A place that is used for the first time still holds what an earlier prompt left there.
    mixed, tail = short_conv_prefill(
        mixed_qkv,
        conv_weight,
        cu_seqlens=cu_seqlens,
        initial_state=conv_state[places].masked_fill(fresh[:, None, None], 0),
        round_sum=round_steps,
    )
    q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
    g, beta = gated_delta_gates(a, b, A_log=A_log, dt_bias=dt_bias, round_beta=round_steps)
    states = recurrent_state[places]
    o, final = gated_delta_prefill(
        q.reshape(T, H, K),
        k.reshape(T, H, K),
        v.reshape(T, HV, V),
        g,
        beta,
        cu_seqlens=cu_seqlens,
        initial_state=(merge_state(states) if split else states).masked_fill(fresh[:, None, None, None], 0),
    )
    final, tail, places = final[kept], tail[kept], places[kept]
    recurrent_state[places] = (
        split_state(final.to(torch.float32)) if split else final.to(recurrent_state.dtype)
    )
    conv_state[places] = tail.to(conv_state.dtype)
    return o
