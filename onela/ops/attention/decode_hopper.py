"""Beam attention on Hopper: what its kernel takes, and its launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops.attention._decode_hopper_kernel import beam_attention_hopper_kernel
from onela.ops.attention.decode import beam_attention_triton, check_attention, choose_splits, merge_splits

BLOCK_M = 128
BLOCK_N = 64
NUM_WARPS = 8
HEAD_SIZES = (64, 128, 256)
# Gathered units of 64 keys that a program lists: what shared memory leaves room for at the largest head.
MAX_EXTRA = 10


def supports(q: Tensor, k_cache: Tensor, records_k: Tensor) -> bool:
    """Whether the kernel takes these tensors: half precision, heads of 64, 128 or 256, pages of 64 or more."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HEAD_SIZES
        and k_cache.shape[1] >= BLOCK_N
        and k_cache.shape[1] & (k_cache.shape[1] - 1) == 0
        and k_cache.shape[0] > 0
        and records_k.dtype == q.dtype
    )


def beam_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prompt_lens: Tensor,
    records_k: Tensor,
    records_v: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """`beam_attention_triton` for Hopper, where `supports` says so. Same arguments, contract and errors.

    Trees so deep that the beams' own keys fill more than ten units of a tile go to `beam_attention_triton`.
    """
    check_attention(
        q, k, v, k_cache, v_cache, page_table, records_k, records_v, slots, ancestors, cu_rows, prompts, depths
    )  # fmt: skip
    N, HQ, D = q.shape
    HKV, page_size = k.shape[1], k_cache.shape[1]
    G, B = HQ // HKV, cu_rows.shape[0] - 1
    o = torch.empty(N, HQ, D, dtype=q.dtype, device=q.device)
    if N == 0 or B == 0:
        return o.zero_()
    own = BLOCK_M // G if BLOCK_M % G == 0 else (BLOCK_M - 1) // G + 2
    extra = triton.cdiv((ancestors.shape[1] + 1) * own + BLOCK_N - 1, BLOCK_N)
    if extra > MAX_EXTRA:
        return beam_attention_triton(
            q, k, v, k_cache=k_cache, v_cache=v_cache, page_table=page_table, prompt_lens=prompt_lens,
            records_k=records_k, records_v=records_v, slots=slots, ancestors=ancestors, cu_rows=cu_rows,
            prompts=prompts, depths=depths, scale=scale, splits=splits,
        )  # fmt: skip
    if splits is None:
        units = page_table.shape[1] * page_size // BLOCK_N
        splits = choose_splits(triton.cdiv(N * G, BLOCK_M) * HKV, units, q.device)
    part_lse = torch.empty(splits, N, HQ, dtype=torch.float32, device=q.device) if splits > 1 else None
    part_o = torch.empty(splits, N, HQ, D, dtype=torch.float32, device=q.device) if splits > 1 else None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(cache.view(-1, HKV * D), [BLOCK_N, D], layout)
        for cache in (k_cache, v_cache)
    )
    scale = D**-0.5 if scale is None else scale
    beam_attention_hopper_kernel[(N * G // BLOCK_M + B, HKV, splits)](
        q, k, v, k_desc, v_desc, k_cache, v_cache, page_table, prompt_lens, records_k, records_v, slots,
        ancestors, cu_rows, prompts, depths, o if part_o is None else part_o, part_lse, q.stride(0),
        k.stride(0), v.stride(0), page_table.stride(0), ancestors.stride(0), scale * math.log2(math.e), N, B,
        HKV=HKV, G=G, D=D, PAGE=page_size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, OWN=own, EXTRA=extra,
        SPLITS=splits, BLOCK_B=max(32, triton.next_power_of_2(B)), num_warps=NUM_WARPS,
    )  # fmt: skip
    if part_o is not None:
        merge_splits(part_o, part_lse, o, cu_rows)
    return o
