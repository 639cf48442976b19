"""The recurrence of packed prompts by fla-core's chunked kernels, where that package is installed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from onela.ops.gated_delta._prefill_kernel import load_states_kernel, store_states_kernel
from onela.ops.prefill_tables import CHUNK, PrefillTables

TUNING_TOKENS = 2048
"""Tokens of each of the four sequences that fla-core's kernels are tuned on."""
_tuned: set[tuple[object, ...]] = set()


@lru_cache(maxsize=1)
def chunked_kernels() -> Any:
    """fla-core's steps of the chunked rule as one namespace; None where it is not installed."""
    try:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    except ImportError:
        return None

    class Kernels:
        intra = staticmethod(chunk_gated_delta_rule_fwd_intra)
        states = staticmethod(chunk_gated_delta_rule_fwd_h)
        outputs = staticmethod(chunk_fwd_o)

    return Kernels


def chunk_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    mixed_qkv: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    tables: PrefillTables,
) -> Tensor:
    """The recurrence from the prompts' states to the prompts' states.

    Args, Returns, Writes: as in `chunk_rule_triton`.
    Numerics: normed keys, the chunks' states and their deltas are rounded to 16 bits. The kernels are tuned on the
        first call in a process, which waits for the device.
    """
    tune((q.shape[1], v.shape[1], q.shape[2], v.shape[2]), q.dtype, q.device)
    initial = load_states(recurrent_state, tables) if tables.goes_on else None
    o, final = chunked_rule(q, k, v, g, beta, initial, tables)
    store_states(final, mixed_qkv, recurrent_state, conv_state, tables)
    return o


def chunked_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    tables: PrefillTables,
) -> tuple[Tensor, Tensor]:
    """The recurrence by fla-core's kernels, without its bookkeeping on the host.

    Args:
        q, k: [T, H, K], normed. v: [T, HV, V]. g: [T, HV] fp32, its running sum over each chunk, in base two.
        beta: [T, HV] fp32. initial_state: [S, HV, V, K] fp32; None for zeros.
    Returns:
        o: [T, HV, V]. final_state: [S, HV, V, K] fp32.
    """
    kernels = chunked_kernels()
    places = {"cu_seqlens": tables.cu_seqlens, "chunk_indices": tables.chunks}
    q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
    w, u, _ = kernels.intra(k=k, v=v, g=g, beta=beta, chunk_size=CHUNK, **places)
    states, deltas, final = kernels.states(
        k=k,
        w=w,
        u=u,
        g=g,
        initial_state=initial_state,
        output_final_state=True,
        chunk_size=CHUNK,
        state_v_first=True,
        chunk_offsets=tables.chunk_starts,
        **places,
    )
    o = kernels.outputs(
        q=q,
        k=k,
        v=deltas,
        h=states,
        g=g,
        scale=q.shape[-1] ** -0.5,
        state_v_first=True,
        chunk_size=CHUNK,
        **places,
    )
    return o[0], final


def load_states(recurrent_state: Tensor, tables: PrefillTables) -> Tensor:
    """The fp32 states [S, HV, V, K] that the sequences begin with."""
    split = recurrent_state.dim() == 5
    HV, (V, K) = recurrent_state.shape[1], recurrent_state.shape[-2:]
    S = tables.prompts.shape[0]
    states = torch.empty(S, HV, V, K, dtype=torch.float32, device=recurrent_state.device)
    row, block = HV * V * K, 4096
    load_states_kernel[(triton.cdiv(row, block), S)](
        recurrent_state, tables.prompts, tables.cached_lens, states,
        ROW=row, SIZE=V * K, BLOCK=block, SPLIT=split, num_warps=8,
    )  # fmt: skip
    return states


def store_states(
    final: Tensor, mixed_qkv: Tensor, recurrent_state: Tensor, conv_state: Tensor, tables: PrefillTables
) -> None:
    """Put final states and the convolutions' tails into the prompts' places."""
    V, K = recurrent_state.shape[-2:]
    row = recurrent_state.shape[1] * V * K
    C, tail = conv_state.shape[1:]
    block, block_c = 4096, 1024
    state_blocks = triton.cdiv(row, block)
    store_states_kernel[(state_blocks + triton.cdiv(C, block_c), tables.prompts.shape[0])](
        final, recurrent_state, mixed_qkv, conv_state, tables.cu_seqlens, tables.prompts, tables.cached_lens,
        mixed_qkv.stride(0), state_blocks,
        ROW=row, SIZE=V * K, C=C, KERNEL=tail + 1, BLOCK=block, BLOCK_C=block_c,
        SPLIT=recurrent_state.dim() == 5, CACHED=tables.goes_on, num_warps=8,
    )  # fmt: skip


def tune(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Let fla-core choose its configurations for these heads, on a usual size, once per process.

    It chooses on the first call, whatever its size; the first may be small, and must not be under capture.
    """
    key = (*sizes, dtype, device)
    if key in _tuned:
        return
    H, HV, K, V = sizes
    S, T = 4, 4 * TUNING_TOKENS
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator)

    q, k = (torch.nn.functional.normalize(random(T, H, K), dim=-1).to(dtype) for _ in range(2))
    v, beta = random(T, HV, V).to(dtype), random(T, HV).sigmoid()
    g = -random(T, HV).abs().view(-1, CHUNK, HV).cumsum(1).view(T, HV) * 0.1
    counts = torch.arange(S + 1, dtype=torch.int32, device=device)
    chunk = torch.arange(T // CHUNK, dtype=torch.int32, device=device)
    per_sequence = TUNING_TOKENS // CHUNK
    none = counts.new_empty(0)
    tables = PrefillTables(
        cu_seqlens=counts * TUNING_TOKENS,
        prompts=counts[:S],
        cached_lens=counts[:S],
        chunks=torch.stack([chunk // per_sequence, chunk % per_sequence], 1).contiguous(),
        chunk_starts=counts * per_sequence,
        page_rows=none,
        counter=none,
        num_prompts=S,
        longest=TUNING_TOKENS,
        goes_on=False,
    )
    chunked_rule(q, k, v, g, beta, None, tables)
    _tuned.add(key)
