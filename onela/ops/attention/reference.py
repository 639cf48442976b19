"""Softmax attention with one prompt and many beams.

The prompt's keys are read once for all its beams; each beam's own few keys come through the ancestry index.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.ops._checks import check_float, check_groups, check_index
from onela.ops._dtypes import compute_dtype
from onela.ops.indexing import gather_rows, scatter_rows
from onela.ops.prefill_tables import PrefillTables


def prompt_rows(cache: Tensor, page_table: Tensor, prompt: int, length: int) -> Tensor:
    """Gather one prompt's rows from its pages.

    Args:
        cache: [num_pages, page_size, HKV, D].
        page_table: [num_prompts, max_pages] int32.
        prompt, length: which prompt, and how many of its tokens.
    Returns:
        [length, HKV, D].
    """
    page_size = cache.shape[1]
    pages = page_table[prompt, : -(-length // page_size)].to(torch.int64)
    return cache[pages].flatten(0, 1)[:length]


def beam_attention_ref(
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
    """One decode step: every beam attends to its prompt, to its ancestors' keys and to its own.

    Args:
        q: [N, HQ, D]; k, v: [N, HKV, D]; HQ a multiple of HKV, positions already applied.
        k_cache, v_cache: [num_pages, page_size, HKV, D].
        page_table: [num_prompts, max_pages] int32, pages of each prompt in order.
        prompt_lens: [num_prompts] int32, tokens of each prompt.
        records_k, records_v: [num_slots, HKV, D].
        slots, ancestors, cu_rows, prompts, depths: as in `onela.ops.gated_delta.replay_step_ref`.
        scale: None means `D**-0.5`.
    Returns:
        o: [N, HQ, D] in q's dtype.

    Writes: records_k and records_v at `slots`.
    Padding: rows whose slot is PAD, and rows past `cu_rows[-1]`, read and write nothing and give zeros.
    Aliasing: ancestors may repeat between rows; no slot that is written is read as an ancestor in the same launch.
    Numerics: fp32 scores, one softmax over the prompt's keys and the beam's own; deterministic.
    """
    N, HQ, D = q.shape
    HKV = k.shape[1]
    groups = check_groups(HQ, HKV)
    check_float("k", k, N, HKV, D)
    check_float("v", v, N, HKV, D)
    check_float("k_cache", k_cache, None, None, HKV, D)
    check_float("v_cache", v_cache, *k_cache.shape)
    check_float("records_k", records_k, None, HKV, D)
    check_float("records_v", records_v, None, HKV, D)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    dtype = compute_dtype(q)
    scale = D**-0.5 if scale is None else scale
    out = torch.zeros(N, HQ, D, dtype=q.dtype, device=q.device)
    bounds, lengths = cu_rows.tolist(), prompt_lens.tolist()
    for r, (p, depth) in enumerate(zip(prompts.tolist(), depths.tolist())):
        rows = slice(bounds[r], bounds[r + 1])
        W = bounds[r + 1] - bounds[r]
        if p < 0 or W == 0:
            continue
        own = torch.cat([ancestors[rows, :depth], slots[rows, None].to(ancestors.dtype)], dim=1)
        scatter_rows(records_k, slots[rows], k[rows])
        scatter_rows(records_v, slots[rows], v[rows])
        # Query heads that share a key head lie side by side, so the prompt's keys are read once for all beams.
        queries = (q[rows].to(dtype) * scale).reshape(W, HKV, groups, D)
        keys = prompt_rows(k_cache, page_table, p, lengths[p]).to(dtype)
        values = prompt_rows(v_cache, page_table, p, lengths[p]).to(dtype)
        shared = torch.einsum("wgrd,lgd->gwrl", queries, keys)
        own_keys = gather_rows(records_k, own).to(dtype)
        own_values = gather_rows(records_v, own).to(dtype)
        alone = torch.einsum("wgrd,wtgd->gwrt", queries, own_keys)
        alone = alone.masked_fill((own < 0)[None, :, None, :], float("-inf"))
        weights = torch.cat([shared, alone], dim=-1)
        # A padding row has no key of its own, and over an empty prompt no key at all: its weights are NaN,
        # its output zero.
        weights = torch.softmax(weights, dim=-1)
        split = keys.shape[0]
        o = torch.einsum("gwrl,lgd->wgrd", weights[..., :split], values)
        o = o + torch.einsum("gwrt,wtgd->wgrd", weights[..., split:], own_values)
        out[rows] = o.reshape(W, HQ, D).masked_fill((slots[rows] < 0)[:, None, None], 0).to(q.dtype)
    return out


def prefill_attention_ref(
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
    """Causal attention of packed prompts, each after what its pages already hold; writes the new keys into the pages.

    Args:
        q: [T, HQ, D]; k, v: [T, HKV, D], positions already applied.
        k_cache, v_cache: [num_pages, page_size, HKV, D].
        page_table: [num_prompts, max_pages] int32.
        cached_lens: [B] int32, tokens of each sequence that the pages hold already.
        cu_seqlens: [B+1] int32, new tokens of each sequence; prompts: [B] int32, its row of the page table, or PAD.
        scale: None means `D**-0.5`.
        last_only: q is the last token of each sequence, [B, HQ, D]; or of the first ones, and the rest asks nothing.
        kept: k and v are in their pages already; not read here: to write them again changes nothing.
        tables: the prompts on the device, for a kernel; not read here.
    Returns:
        o: as q, in q's dtype. The row of a sequence without new tokens means nothing.

    Writes: k_cache and v_cache at the new tokens' places.
    Padding: a sequence whose row is PAD has no pages; its keys go nowhere.
    Layout: cu_seqlens, prompts and cached_lens are read on the host.
    Numerics: torch's scaled_dot_product_attention; a sequence does not depend on the others.
    """
    HQ, HKV = q.shape[1], k.shape[1]
    check_groups(HQ, HKV)
    page_size = k_cache.shape[1]
    out = torch.zeros_like(q) if last_only else torch.empty_like(q)
    bounds = cu_seqlens.tolist()
    for n, (p, cached) in enumerate(zip(prompts.tolist(), cached_lens.tolist())):
        rows = slice(bounds[n], bounds[n + 1])
        new = bounds[n + 1] - bounds[n]
        asking = slice(n, n + 1) if last_only else rows
        if new == 0 or asking.start >= q.shape[0]:
            continue
        places = torch.arange(cached, cached + new, device=q.device)
        if p >= 0:
            pages = page_table[p].to(torch.int64)[places // page_size]
            k_cache[pages, places % page_size] = k[rows].to(k_cache.dtype)
            v_cache[pages, places % page_size] = v[rows].to(v_cache.dtype)
        keys, values, mask = k[rows], v[rows], None
        if cached:
            keys = prompt_rows(k_cache, page_table, p, cached + new).to(q.dtype)
            values = prompt_rows(v_cache, page_table, p, cached + new).to(q.dtype)
            mask = torch.arange(cached + new, device=q.device)[None, :] <= places[:, None]
        out[asking] = F.scaled_dot_product_attention(
            q[asking].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=None if last_only else mask,
            is_causal=mask is None and not last_only,
            scale=scale,
            enable_gqa=HQ != HKV,
        )[0].transpose(0, 1)
    return out
