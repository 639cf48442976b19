"""Attention of a decode step over a copy of the prompt's keys for every beam, as engines do that hold a cache per beam.

The sums are those of torch's `scaled_dot_product_attention` over whole rows of keys, in whatever order it takes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onela.ops._checks import check_float, check_groups, check_index
from onela.ops.attention.reference import prompt_rows
from onela.ops.indexing import gather_rows, scatter_rows

COPY_BYTES = 1 << 30
"""So much memory the copied keys and values of the beams that are looked at together may take."""


def beam_attention_copied(
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
    """`beam_attention_ref`'s contract by torch's attention: each beam's keys, prompt and all, are copied side by side.

    Args, Returns, Writes, Aliasing: as in `beam_attention_ref`.
    Padding: as there; rows that are PAD are computed over zeros of their own.
    Layout: cu_rows, prompts, depths and prompt_lens are read on the host: a GPU is waited for.
    Numerics: `scaled_dot_product_attention` of one query a row without a mask, over the same keys in the same layout as
        a caller has them who holds a cache for every row: the same bits, as far as torch's choice for the device
        repeats its own. cuDNN's does not quite: of a million results of the same call a few differ in their last bit.
    Raises: ShapeError, DtypeError.
    """
    N, HQ, D = q.shape
    HKV = k.shape[1]
    check_groups(HQ, HKV)
    check_float("k", k, N, HKV, D)
    check_float("v", v, N, HKV, D)
    check_float("k_cache", k_cache, None, None, HKV, D)
    check_float("v_cache", v_cache, *k_cache.shape)
    check_float("records_k", records_k, None, HKV, D)
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    out = torch.zeros_like(q)
    # One look at the device instead of four.
    host = torch.cat([cu_rows, prompts, depths, prompt_lens]).tolist()
    bounds, host = host[: len(cu_rows)], host[len(cu_rows) :]
    places, host = host[: len(prompts)], host[len(prompts) :]
    for r, p in enumerate(places):
        depth, W = host[r], bounds[r + 1] - bounds[r]
        if p < 0 or W == 0:
            continue
        length = host[len(depths) + p]
        shared = [prompt_rows(cache, page_table, p, length).transpose(0, 1) for cache in (k_cache, v_cache)]
        pieces = -(-W * (length + depth + 1) * HKV * D * 2 * q.element_size() // COPY_BYTES)
        size = -(-W // pieces)
        for start in range(bounds[r], bounds[r + 1], size):
            rows = slice(start, min(start + size, bounds[r + 1]))
            scatter_rows(records_k, slots[rows], k[rows])
            scatter_rows(records_v, slots[rows], v[rows])
            own = torch.cat([ancestors[rows, :depth], slots[rows, None].to(ancestors.dtype)], dim=1)
            # Head by head, as caches lie.
            keys, values = (
                torch.cat(
                    [
                        prompt.expand(len(own), -1, -1, -1),
                        gather_rows(records, own).to(prompt.dtype).transpose(1, 2),
                    ],
                    dim=2,
                ).contiguous()
                for prompt, records in zip(shared, (records_k, records_v))
            )
            found = F.scaled_dot_product_attention(
                q[rows, :, None], keys, values, scale=scale, enable_gqa=HQ != HKV
            )[:, :, 0]
            out[rows] = found.masked_fill((slots[rows] < 0)[:, None, None], 0)
    return out
