"""Beam attention against dense attention over each beam's own sequence; prefill against torch's causal attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onela.ops.attention import beam_attention, prefill_attention
from tests.ops.trees import SHAPES, random_tree
from tests.tolerances import EXACT_FP64

HQ, HKV, D, PAGE = 6, 2, 8, 4


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value pages of prompts of these lengths, in shuffled pages; NaN where there is no token."""
    counts = [-(-n // PAGE) for n in lengths]
    pages = torch.randperm(sum(counts) + 2).tolist()
    table = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    cache = torch.full((2, sum(counts) + 2, PAGE, HKV, D), torch.nan, dtype=torch.float64)
    for prompt, (length, count) in enumerate(zip(lengths, counts)):
        own = [pages.pop() for _ in range(count)]
        table[prompt, :count] = torch.tensor(own, dtype=torch.int32)
        for t in range(length):
            cache[:, own[t // PAGE], t % PAGE] = torch.randn(2, HKV, D, dtype=torch.float64)
    return cache[0], cache[1], table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_each_beam_equals_dense_attention(widths: list[list[int]], length: int) -> None:
    tree = random_tree(widths, dead=0.2)
    lengths = [length + 3 * i for i in range(len(widths))]
    k_cache, v_cache, table, prompt_lens = paged(lengths)
    N = len(tree.paths)
    q = torch.randn(N, HQ, D, dtype=torch.float64)
    keys, values = torch.randn(2, tree.num_slots, HKV, D, dtype=torch.float64)
    records_k, records_v = keys.clone(), values.clone()
    own = torch.tensor([path[-1] if path else 0 for path in tree.paths])
    unwritten = [path[-1] for path in tree.paths if path]
    records_k[unwritten] = torch.nan
    records_v[unwritten] = torch.nan
    o = beam_attention(
        q,
        keys[own],
        values[own],
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=table,
        prompt_lens=prompt_lens,
        records_k=records_k,
        records_v=records_v,
        **tree.index,
    )
    for row, path in enumerate(tree.paths):
        if path is None:
            assert not o[row].any()
            continue
        prompt = tree.request_of[row]
        pages = table[prompt, : -(-lengths[prompt] // PAGE)].long()
        k = torch.cat([k_cache[pages].flatten(0, 1)[: lengths[prompt]], keys[path]])
        v = torch.cat([v_cache[pages].flatten(0, 1)[: lengths[prompt]], values[path]])
        expected = F.scaled_dot_product_attention(
            q[row][None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
        )[0, :, 0]
        torch.testing.assert_close(o[row], expected, **EXACT_FP64)
        assert torch.equal(records_k[path[-1]], keys[path[-1]])


@pytest.mark.parametrize("lengths", [[5], [1, 9, 4]])
def test_prefill_in_pieces_equals_causal_attention(lengths: list[int]) -> None:
    k_cache, v_cache, table, _ = paged(lengths)
    k_cache.fill_(torch.nan)
    v_cache.fill_(torch.nan)
    sequences = [torch.randn(3, n, HQ, D, dtype=torch.float64) for n in lengths]
    done = [0] * len(lengths)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths)):
        new = [min(3, n - d) for d, n in zip(done, lengths)]
        parts = [s[:, d : d + n] for s, d, n in zip(sequences, done, new)]
        q, k, v = torch.cat(parts, dim=1)
        bounds = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        o = prefill_attention(
            q,
            k[:, :HKV],
            v[:, :HKV],
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=table,
            cached_lens=torch.tensor(done, dtype=torch.int32),
            cu_seqlens=bounds,
            prompts=torch.arange(len(lengths), dtype=torch.int32),
        )
        for out, piece in zip(outputs, o.split(new)):
            out.append(piece)
        done = [d + n for d, n in zip(done, new)]
    for sequence, out in zip(sequences, outputs):
        q, k, v = sequence[0], sequence[1][:, :HKV], sequence[2][:, :HKV]
        expected = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )[0].transpose(0, 1)
        torch.testing.assert_close(torch.cat(out), expected, **EXACT_FP64)
