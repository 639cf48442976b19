"""Beam attention on Hopper: what its kernel takes, and its launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.attention._decode_hopper_kernel import beam_attention_hopper_kernel
from onela.ops.attention.decode import check_attention, choose_splits, merge_splits

BLOCK_M = 128
BLOCK_N = 64
# By head size: stages of 64 keys, columns of q that are held in registers, registers of a thread that computes, and
# of one that loads.
LAUNCH = {64: (8, 64, 200, 104), 128: (8, 128, 200, 104), 256: (5, 0, 224, 56)}
# Tiles of a device and a stream whose splits may be added up by the programs themselves.
MAX_PAIRS = 1024
_FLAGS: dict[tuple[torch.device, int], Tensor] = {}


def supports(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, records_k: Tensor) -> bool:
    """Whether the kernel takes these tensors: half precision, heads of 64, 128 or 256, pages of 64 or more.

    The heads of q, k and v begin in multiples of 16 bytes.
    """
    return (
        has_wgmma(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in LAUNCH
        and k.dtype == v.dtype == q.dtype
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 for x in (q, k, v))
        and k_cache.shape[1] >= BLOCK_N
        and k_cache.shape[1] & (k_cache.shape[1] - 1) == 0
        and k_cache.shape[0] > 0
        and records_k.dtype == q.dtype
    )


def split_flags(device: torch.device, tiles: int) -> Tensor | None:
    """Flags between the programs of two splits, zero between launches; None where there can be none.

    A stream has its own: launches on two streams may run at the same time. They cannot be made while a graph is
    captured, so a capture finds those of its stream if the same has run on it before, as capturing needs anyway.
    """
    if tiles > MAX_PAIRS:
        return None
    stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _FLAGS:
        if torch.cuda.is_current_stream_capturing():
            return None
        _FLAGS[device, stream] = torch.zeros(2 * MAX_PAIRS, dtype=torch.int32, device=device)
    return _FLAGS[device, stream]


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
    """`beam_attention_triton` for Hopper, where `supports` says so. Same arguments, contract and errors."""
    check_attention(
        q, k, v, k_cache, v_cache, page_table, records_k, records_v, slots, ancestors, cu_rows, prompts, depths
    )  # fmt: skip
    N, HQ, D = q.shape
    HKV, page_size = k.shape[1], k_cache.shape[1]
    G, B = HQ // HKV, cu_rows.shape[0] - 1
    o = torch.empty(N, HQ, D, dtype=q.dtype, device=q.device)
    if N == 0 or B == 0:
        return o.zero_()
    # Beams that a warpgroup's 64 rows may belong to.
    rows = BLOCK_M // 2
    own = rows // G if rows % G == 0 else (rows - 1) // G + 2
    if splits is None:
        units = page_table.shape[1] * page_size // BLOCK_N
        splits = choose_splits(triton.cdiv(N * G, BLOCK_M) * HKV, units, q.device)
    tiles = (N * G // BLOCK_M + B) * HKV
    # Of two splits, the second's programs add up what the first's leave them. With more, one program would read too
    # much: the splits are merged by a launch of their own.
    flags = split_flags(q.device, tiles) if splits == 2 else None
    part_o = part_lse = None
    if flags is not None:
        part_o = torch.empty(tiles, BLOCK_M, D, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(tiles, 2, BLOCK_M, dtype=torch.float32, device=q.device)
    elif splits > 1:
        part_o = torch.empty(splits, N, HQ, D, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, N, HQ, dtype=torch.float32, device=q.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(cache.view(-1, HKV * D), [BLOCK_N, D], layout)
        for cache in (k_cache, v_cache)
    )
    q_desc = None
    if rows % G == 0:
        # Rows past the last come as zeros.
        boxes = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        q_desc = TensorDescriptor(q, [N, HQ, D], [q.stride(0), D, 1], [rows // G, G, D], boxes)
    scale = D**-0.5 if scale is None else scale
    stages, held, registers, loader_registers = LAUNCH[D]
    programs = min(multiprocessors(q.device), tiles * splits)
    beam_attention_hopper_kernel[(programs,)](
        q, q_desc, k, v, k_desc, v_desc, v_cache, page_table, prompt_lens, records_k, records_v, slots, ancestors,
        cu_rows, prompts, depths, part_o, o, part_lse, flags, q.stride(0), k.stride(0), v.stride(0),
        page_table.stride(0), ancestors.stride(0), scale * math.log2(math.e), N, B,
        HKV=HKV, G=G, D=D, PAGE=page_size, OWN=own, SPLITS=splits, FUSED=flags is not None, STAGES=stages,
        BLOCK_B=max(32, triton.next_power_of_2(B)), HELD=held, REGISTERS=registers,
        LOADER_REGISTERS=loader_registers, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if part_o is not None and flags is None:
        merge_splits(part_o, part_lse, o, cu_rows)
    return o
