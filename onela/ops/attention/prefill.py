"""Causal attention of packed prompts on a GPU.

New keys go to their pages in one launch. When every prompt is new, attention reads the keys as they are: by a kernel of
our own on Hopper, elsewhere by cuDNN's where the prompts form a rectangle and flash attention where they are packed.
Where prompts go on from what they hold already, a portable kernel of our own reads all keys from their pages.
"""

from __future__ import annotations

import inspect
import logging
import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onela.ops._checks import check_float, check_groups, check_index
from onela.ops._device import multiprocessors, shared_memory
from onela.ops.attention import prefill_hopper
from onela.ops.attention._prefill_kernel import (
    last_row_kernel,
    merge_parts_kernel,
    pages_attention_kernel,
    write_pages_kernel,
)
from onela.ops.attention.decode import INTERPRETED
from onela.ops.prefill_tables import PrefillTables

logger = logging.getLogger(__name__)
PARTS = 32
"""The most parts that the keys of a prompt are read in."""
HALVES = (torch.bfloat16, torch.float16)
_refused: dict[tuple[object, ...], str] = {}
"""Heads that cuDNN has refused, and why."""


def supports(q: Tensor, k_cache: Tensor) -> bool:
    """Whether packed attention takes these: on a GPU, 16-bit, heads of at most 256."""
    D = q.shape[-1]
    return q.is_cuda and q.dtype in HALVES and k_cache.dtype == q.dtype and D <= 256 and D % 8 == 0


def prefill_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    scale: float | None = None,
    last_only: bool = False,
    kept: bool = False,
    tables: PrefillTables,
) -> Tensor:
    """`prefill_attention_ref`'s contract on a GPU, for 16-bit rows.

    Args:
        as in `prefill_attention_ref`; the prompts are those of `tables`.
    Returns:
        o: as q.

    Writes: k_cache and v_cache at the new tokens' places, unless they are kept there already.
    Layout: rows of q, k and v may be strided, the heads of a row adjoin; k_cache and v_cache are contiguous.
    Padding: the last sequence of the tables is computed and its keys go nowhere.
    Numerics: fp32 scores and softmax, weights rounded to q's dtype.
    Raises: ShapeError, DtypeError.
    """
    T, HKV, D = k.shape
    check_groups(q.shape[1], HKV)
    check_float("q", q, tables.num_prompts if last_only else T, None, D)
    check_float("v", v, T, HKV, D)
    check_float("k_cache", k_cache, None, None, HKV, D)
    check_float("v_cache", v_cache, *k_cache.shape)
    check_index("page_rows", tables.page_rows, T)
    q, k, v = (x if x.stride(-1) == 1 and x.stride(1) == D else x.contiguous() for x in (q, k, v))
    if not kept:
        write_pages(k, v, k_cache, v_cache, tables)
    scale = D**-0.5 if scale is None else scale
    if tables.goes_on:
        return pages_attention(q, k_cache, v_cache, page_table, tables, scale, last_only=last_only)
    if last_only:
        return last_row_attention(q, k, v, tables.cu_seqlens, 2 if tables.rectangle else 1, scale)
    if prefill_hopper.supports(q, k, v, tables):
        return prefill_hopper.prompt_attention_hopper(q, k, v, tables, scale)
    if tables.rectangle and refused(q, k) is None:
        try:
            return dense_attention(q, k, v, tables.num_prompts, scale)
        except RuntimeError as error:
            refuse(q, k, error)
    return flash_attention(q, k, v, tables.cu_seqlens, tables.longest, scale)


def pages_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    tables: PrefillTables,
    scale: float,
    *,
    last_only: bool,
) -> Tensor:
    """Causal attention of new tokens over all keys in their prompts' pages, cut into parts where tiles are too few.

    Args:
        q: [T, HQ, D], or with `last_only` [B, HQ, D].
        k_cache, v_cache: [pages, page_size, HKV, D]. page_table: [num_prompts, max_pages] int32.
    Returns:
        o: as q, zeros for a row that sees no keys.
    """
    T, HQ, D = q.shape
    page_size, HKV = k_cache.shape[1:3]
    G = HQ // HKV
    # The padding behind the prompts has no last token that anybody asks for.
    S = tables.num_prompts if last_only else tables.prompts.shape[0]
    block_m = 128 if T * G >= 128 and not last_only else max(16, triton.next_power_of_2(G))
    block_n, block_d = 64, triton.next_power_of_2(D)
    # A tile of queries and two blocks of keys and values each in flight must fit into shared memory.
    while block_n > 16 and (block_m + 4 * block_n) * block_d * q.element_size() > shared_memory(q.device):
        block_n //= 2
    tiles = triton.cdiv(T * G, block_m) * HKV
    # As many parts as fill the device, a power of two, none of less than four blocks.
    wanted = min(multiprocessors(q.device) // tiles, page_table.shape[1] * page_size // (4 * block_n), PARTS)
    splits = 1 << max(0, wanted.bit_length() - 1)
    # Prompts without tokens have no tile: nobody writes their rows, nor their parts.
    make = torch.zeros if last_only else torch.empty
    o = make(T, HQ, D, dtype=q.dtype, device=q.device)
    part_o = part_m = part_l = None
    if splits > 1:
        part_o = torch.empty(T, HQ, splits, D, dtype=torch.float32, device=q.device)
        part_m, part_l = (make(T, HQ, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    pages_attention_kernel[(triton.cdiv(T * G, block_m) + S, HKV, splits)](
        q, k_cache, v_cache, page_table, tables.prompts, tables.cached_lens, tables.cu_seqlens, o, part_o, part_m,
        part_l, q.stride(0), page_table.stride(0), scale * math.log2(math.e), S,
        HKV=HKV, G=G, D=D, PAGE=page_size, LAST=last_only, SPLITS=splits, BLOCK_S=triton.next_power_of_2(S),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, UPCAST=INTERPRETED,
        num_warps=8 if block_m == 128 else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_parts_kernel[(T * HQ,)](
            part_o, part_m, part_l, o, D=D, SPLITS=splits, BLOCK_D=block_d, num_warps=4
        )
    return o


def last_row_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, step: int, scale: float
) -> Tensor:
    """Attention of one row per prompt over all of its keys, which are cut into parts for many programs.

    Args:
        q: [B, HQ, D]; k, v: [T, HKV, D]. cu_seqlens: [S+1] int32, bounds of the sequences.
        step: prompt n is sequence `n * step`.
    Returns:
        o: [B, HQ, D], zeros for a prompt without keys.
    """
    B, HQ, D = q.shape
    HKV = k.shape[1]
    o = torch.empty(B, HQ, D, dtype=q.dtype, device=q.device)
    part_o = torch.empty(B, HQ, PARTS, D, dtype=torch.float32, device=q.device)
    part_m, part_l = (torch.empty(B, HQ, PARTS, dtype=torch.float32, device=q.device) for _ in range(2))
    block_d = triton.next_power_of_2(D)
    last_row_kernel[(PARTS, B, HKV)](
        q, k, v, cu_seqlens, part_o, part_m, part_l, q.stride(0), k.stride(0), v.stride(0), scale * math.log2(math.e),
        HKV=HKV, G=HQ // HKV, D=D, STEP=step, SPLITS=PARTS, BLOCK_G=max(16, triton.next_power_of_2(HQ // HKV)),
        BLOCK_N=64, BLOCK_D=block_d, UPCAST=INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    merge_parts_kernel[(B * HQ,)](part_o, part_m, part_l, o, D=D, SPLITS=PARTS, BLOCK_D=block_d, num_warps=4)
    return o


def write_pages(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, tables: PrefillTables) -> None:
    """Put new keys and values [T, HKV, D] into their pages [pages, page_size, HKV, D], in one launch."""
    T, HKV, D = k.shape
    block_d = triton.next_power_of_2(HKV * D)
    block_r = max(1, 4096 // block_d)
    write_pages_kernel[(triton.cdiv(T, block_r),)](
        k, v, k_cache, v_cache, tables.page_rows, T, k.stride(0), v.stride(0),
        SIZE=HKV * D, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def dense_attention(q: Tensor, k: Tensor, v: Tensor, num_prompts: int, scale: float) -> Tensor:
    """Causal attention of prompts that have as many rows each and begin here, by cuDNN.

    A token sees none behind it, so it does not matter which rows at a prompt's end are padding.

    Args:
        q: [B * L, HQ, D]; k, v: [B * L, HKV, D]. num_prompts: B.
    Returns:
        o: as q.
    Raises:
        RuntimeError: cuDNN does not take these.
    """
    q_rows, k_rows, v_rows = (x.unflatten(0, (num_prompts, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = F.scaled_dot_product_attention(
            q_rows, k_rows, v_rows, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o.transpose(1, 2).reshape(q.shape)


def refused(q: Tensor, k: Tensor) -> str | None:
    """Why cuDNN does not take these heads; None when it does, or has not been asked."""
    if torch.cuda.get_device_capability(q.device)[0] < 9:
        return "before Hopper flash attention is as fast"
    return _refused.get(_case(q, k))


def refuse(q: Tensor, k: Tensor, error: Exception) -> None:
    """Note that cuDNN does not take these heads: it is not asked again."""
    _refused[_case(q, k)] = str(error)
    logger.info("attention of prompts runs without cuDNN: %s", str(error).splitlines()[0])


def _case(q: Tensor, k: Tensor) -> tuple[object, ...]:
    return q.shape[1:], k.shape[1:], q.dtype, q.device


@lru_cache(maxsize=1)
def _flash_options() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """torch's packed attention, and the words for causal attention and for grouped heads in this version of it."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    return varlen_attn, causal, {"enable_gqa": True} if "enable_gqa" in names else {}


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    """Causal attention of packed prompts by flash attention.

    Args:
        q: [T, HQ, D]; k, v: [T, HKV, D]; cu_seqlens: [S+1] int32, bounds of the sequences.
        longest: no sequence has more.
    Returns:
        o: as q.
    """
    run, causal, grouped = _flash_options()
    if q.shape[1] == k.shape[1]:
        grouped = {}
    return run(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **causal, **grouped)
