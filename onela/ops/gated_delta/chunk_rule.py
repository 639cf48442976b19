"""The recurrence of packed prompts in two launches, for Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.gated_delta._chunk_kernel import chunk_prepare_kernel, chunk_scan_kernel
from onela.ops.prefill_tables import CHUNK, PrefillTables


@dataclass(frozen=True)
class ChunkConfig:
    """One way to cut the recurrence.

    Args:
        block_v: value columns of a program that walks over a sequence's chunks.
        prepare_warps, scan_warps: warps of a program of each launch. stages: chunks on their way to shared memory.
    """

    block_v: int = 32
    prepare_warps: int = 4
    scan_warps: int = 4
    stages: int = 2


def takes(K: int, V: int, device: torch.device) -> bool:
    """Whether the kernels suit these heads: on Hopper, sizes that have been tried; others read where they must not."""
    return K == V and K in (32, 64, 128) and has_wgmma(device)


def choose_config(num_heads: int, V: int, cached: bool, device: torch.device) -> ChunkConfig:
    """How to cut the work of `num_heads` heads, those of all prompts together.

    Wide programs read a chunk's rows fewer times, which is what they wait for; narrow ones are more, for few heads.
    Where a prompt goes on from a state (`cached`), what is new is short, and a third stage buys nothing.
    """
    if V < 128:
        return ChunkConfig(block_v=16)
    if 4 * num_heads <= multiprocessors(device):
        return ChunkConfig(block_v=32, stages=2 if cached else 3)
    return ChunkConfig(block_v=64)


def chunk_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    mixed_qkv: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    tables: PrefillTables,
    *,
    config: ChunkConfig | None = None,
) -> Tensor:
    """The recurrence of packed prompts, from their states to their states, and the tails of their convolutions.

    Args:
        q, k: [T, H, K], normed. v: [T, HV, V]. g: [T, HV] fp32, its running sum over each chunk, in base two.
        beta: [T, HV] fp32. mixed_qkv: [T, conv_dim], the inputs of the convolution.
        recurrent_state: [num_prompts, HV, V, K] fp32 or split. conv_state: [num_prompts, conv_dim, kernel_size - 1].
        tables: where the prompts lie. config: how the work is cut; None: as suits the sizes.
    Returns:
        o: [T, HV, V] in v's dtype.

    Writes: recurrent_state and conv_state at the prompts that have new tokens.
    Numerics: fp32 sums of 16-bit operands; the state stays fp32 from chunk to chunk, and is rounded where it is
        multiplied; deterministic.
    """
    config = config or choose_config(tables.num_prompts * v.shape[1], v.shape[2], tables.goes_on, q.device)
    T, H, K = q.shape
    HV, V = v.shape[1:]
    w, u, p = q.new_empty(T, HV, K), torch.empty_like(v), q.new_empty(T, HV, CHUNK)
    o = torch.empty_like(v)
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "CHUNK": CHUNK}
    scale = K**-0.5
    chunk_prepare_kernel[(HV, tables.chunks.shape[0])](
        *(q, k, v, g, beta, w, u, p, tables.cu_seqlens, tables.chunks, scale),
        **sizes,
        LEVELS=CHUNK.bit_length() - 1,
        BLOCK_V=min(V, 64),
        num_warps=config.prepare_warps,
    )
    chunk_scan_kernel[(V // config.block_v, tables.prompts.shape[0] * HV)](
        *(q, k, w, u, p, g, o, recurrent_state, mixed_qkv, conv_state),
        *(tables.cu_seqlens, tables.prompts, tables.cached_lens, mixed_qkv.stride(0), scale),
        **sizes,
        BLOCK_V=config.block_v,
        KERNEL=conv_state.shape[2] + 1,
        SPLIT=recurrent_state.dim() == 5,
        CACHED=tables.goes_on,
        num_warps=config.scan_warps,
        num_stages=config.stages,
    )
    return o
