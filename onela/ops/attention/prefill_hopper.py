"""Causal attention of new prompts on Hopper: what its kernel takes, and its launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.attention._prefill_hopper_kernel import prompt_attention_hopper_kernel
from onela.ops.prefill_tables import CHUNK, PrefillTables

ROWS = CHUNK
# By head size: keys of a unit, stages of so many, tiles whose queries are in shared memory at once.
LAUNCH: dict[int, tuple[int, int, int]] = {64: (128, 8, 2), 128: (128, 5, 2), 256: (64, 5, 1)}
# Registers of a thread that computes, and of one that loads.
REGISTERS = (232, 40)


def supports(q: Tensor, k: Tensor, v: Tensor, tables: PrefillTables) -> bool:
    """Whether the kernel takes these rows and is known to be the fastest.

    Half precision, heads of 64, 128 or 256, an even number of query heads for each key head; rows begin in multiples of
    16 bytes. Several prompts that form a rectangle, with heads of 256, are left to cuDNN.
    """
    D = q.shape[-1]
    return (
        has_wgmma(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and D in LAUNCH
        and (D < 256 or tables.num_prompts == 1 or not tables.rectangle)
        and q.shape[1] % (2 * k.shape[1]) == 0
        and k.dtype == v.dtype == q.dtype
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 for x in (q, k, v))
    )


def prompt_attention_hopper(q: Tensor, k: Tensor, v: Tensor, tables: PrefillTables, scale: float) -> Tensor:
    """Causal attention of packed prompts that begin here.

    Args:
        q: [T, HQ, D]; k, v: [T, HKV, D], heads of a row adjoin.
        tables: bounds and chunks of the sequences, which hold all T tokens; and the counter.
    Returns:
        o: [T, HQ, D], padding's rows too.

    Numerics: fp32 scores and softmax, weights rounded to q's dtype; deterministic, whatever other prompts hold.
    """
    T, HQ, D = q.shape
    G = HQ // k.shape[1]
    unit, stages, queries = LAUNCH[D]
    o = torch.empty(T, HQ, D, dtype=q.dtype, device=q.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_desc, k_desc, v_desc = (
        TensorDescriptor(x, [T, x.shape[1] * D], [x.stride(0), 1], [rows, D], layout)
        for x, rows in ((q, ROWS), (k, unit), (v, unit))
    )
    programs = min(multiprocessors(q.device), tables.chunks.shape[0] * (HQ // 2))
    prompt_attention_hopper_kernel[(programs,)](
        q_desc, k_desc, v_desc, o, tables.cu_seqlens, tables.chunks, tables.chunk_starts, tables.counter,
        scale * math.log2(math.e), tables.cu_seqlens.shape[0] - 1,
        HQ=HQ, G=G, D=D, UNIT=unit, STAGES=stages, QUERIES=queries,
        REGISTERS=REGISTERS[0], LOADER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return o
