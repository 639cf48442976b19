"""Which implementation of attention runs: Hopper kernel, portable kernel or reference, as the tensors allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onela.ops.attention.reference import beam_attention_ref, prefill_attention_ref
from onela.ops.prefill_tables import PrefillTables

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def beam_attention(
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
) -> Tensor:
    """`beam_attention_ref` by the fastest kernel that can: every beam attends to its prompt, its ancestors and itself.

    On a GPU: the Hopper kernel where it is one and it takes these tensors, else the portable one where heads are at
    most 256 wide (fp32: 128) and pages a power of two of at least 16 tokens. Otherwise, and on a CPU: the reference.

    Args, Returns, Writes, Padding, Aliasing: as in `beam_attention_ref`.
    Numerics: fp32 scores and softmax; the kernels round the weights to q's dtype; deterministic.
    Raises: ShapeError, DtypeError.
    """
    step: dict[str, Any] = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
        "prompt_lens": prompt_lens,
        "records_k": records_k,
        "records_v": records_v,
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    page_size = k_cache.shape[1]
    paged = page_size >= 16 and page_size & (page_size - 1) == 0 and k_cache.dtype == q.dtype
    # Tiles of wide fp32 heads do not fit into shared memory.
    widest = 128 if q.dtype == torch.float32 else 256
    if not (q.is_cuda and q.dtype in FLOATS and q.shape[-1] <= widest and paged):
        return beam_attention_ref(q, k, v, **step, scale=scale)
    from onela.ops.attention.decode import beam_attention_triton
    from onela.ops.attention.decode_hopper import beam_attention_hopper, supports

    if supports(q, k, v, k_cache, records_k):
        return beam_attention_hopper(q, k, v, **step, scale=scale)
    return beam_attention_triton(q, k, v, **step, scale=scale)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cached_lens: Tensor,
    cu_seqlens: Tensor,
    prompts: Tensor,
    scale: float | None = None,
    last_only: bool = False,
    kept: bool = False,
    tables: PrefillTables | None = None,
) -> Tensor:
    """`prefill_attention_ref`; with tables on a GPU and 16-bit rows, by packed attention: our own on Hopper, or
    torch's.

    Args, Returns, Writes: as in `prefill_attention_ref`.
    Padding: with tables, the tokens behind the last prompt are computed and go nowhere.
    Numerics: as in the implementation that runs.
    Raises: ShapeError, DtypeError.
    """
    if tables is not None and q.is_cuda:
        from onela.ops.attention.prefill import prefill_attention_packed, supports

        if supports(q, k_cache):
            return prefill_attention_packed(
                *(q, k, v),
                k_cache=k_cache,
                v_cache=v_cache,
                page_table=page_table,
                scale=scale,
                last_only=last_only,
                kept=kept,
                tables=tables,
            )
    return prefill_attention_ref(
        *(q, k, v),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        cached_lens=cached_lens,
        cu_seqlens=cu_seqlens,
        prompts=prompts,
        scale=scale,
        last_only=last_only,
        kept=kept,
        tables=tables,
    )
