"""Attention of new prompts on Hopper, against softmax in fp32, prompt by prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from onela.ops.prefill_tables import NewTokens, PrefillShape, PrefillTables, TableLayout
from tests.tolerances import ATTENTION

pytest.importorskip("triton")
from onela.ops.attention.prefill_hopper import prompt_attention_hopper, supports

# Lengths, tokens of padding behind them (in a rectangle: behind each), whether they form a rectangle.
CASES = {
    "one token": ((1,), 0, False),
    "one token and padding": ((1,), 63, True),
    "a tile less one": ((63,), 0, False),
    "a tile": ((64,), 0, True),
    "a tile and one": ((65,), 0, False),
    "around a unit": ((127, 128, 129), 3, False),
    "around three tiles, and empty ones": ((191, 0, 192, 193, 1, 0, 2, 64, 320), 9, False),
    "a long prompt": ((5000,), 0, True),
    "a long prompt, padded": ((4990,), 130, True),
    "a rectangle": ((300, 290, 1, 64), 20, True),
    "long beside short ones": ((2000, 37, 1111, 1, 5000, 37), 77, False),
    "many short ones": ((33,) * 60, 50, False),
    "nothing but padding": ((0, 0, 0), 200, False),
}
HEADS = [(16, 8, 128), (8, 1, 128), (8, 2, 256), (8, 2, 64)]


def tables_of(
    lengths: Sequence[int], padding: int, rectangle: bool, device: torch.device
) -> tuple[PrefillTables, int]:
    """The tables of these prompts, and all tokens; where it is no rectangle, two more prompts are unused."""
    if rectangle:
        longest = max(lengths) + padding
        shape = PrefillShape(longest * len(lengths), len(lengths), longest, rectangle=True)
    else:
        shape = PrefillShape(sum(lengths) + padding, len(lengths) + 2, max(*lengths, padding))
    layout = TableLayout(shape, 64)
    prompts = [NewTokens(np.zeros(length, np.int32), 0, i, []) for i, length in enumerate(lengths)]
    return layout.tables(layout.host(prompts).to(device)), shape.num_tokens


def rows_of(T: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries, keys and values side by side in one row of memory."""
    HQ, HKV, D = heads
    generator = torch.Generator(device).manual_seed(T)
    rows = torch.randn(T, (HQ + 2 * HKV) * D, generator=generator, device=device).to(dtype)
    return [x.unflatten(-1, (-1, D)) for x in rows.split([HQ * D, HKV * D, HKV * D], dim=-1)]


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    o = torch.full(q.shape, math.nan, device=q.device)
    G = q.shape[1] // k.shape[1]
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        ahead = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
        for h in range(k.shape[1]):
            scores = q[a:b, h * G : h * G + G].float().transpose(0, 1) @ k[a:b, h].float().T
            weights = (scores * q.shape[-1] ** -0.5).masked_fill_(ahead, -math.inf).softmax(-1)
            o[a:b, h * G : h * G + G] = (weights @ v[a:b, h].float()).transpose(0, 1)
    return o


def run(q: Tensor, k: Tensor, v: Tensor, tables: PrefillTables) -> Tensor:
    # What the result's memory holds before.
    torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)
    o = prompt_attention_hopper(q, k, v, tables, q.shape[-1] ** -0.5)
    assert tables.counter.item() == 0
    return o


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_row_of_every_sequence(name: str, heads: tuple[int, int, int], device: torch.device) -> None:
    tables, T = tables_of(*CASES[name], device)
    q, k, v = rows_of(T, heads, torch.bfloat16, device)
    _, _, rectangle = CASES[name]
    several = rectangle and tables.num_prompts > 1
    assert supports(q, k, v, tables) == (heads[2] < 256 or not several)
    o = run(q, k, v, tables)
    wanted = softmax_by_hand(q, k, v, tables.cu_seqlens)
    torch.testing.assert_close(o.float(), wanted, **ATTENTION["bf16"])
    for _ in range(5):
        assert torch.equal(run(q, k, v, tables), o)


@pytest.mark.gpu
def test_half_precision_and_large_scores(device: torch.device) -> None:
    """Scores of a hundred, so that peaks move and weights vanish."""
    tables, T = tables_of((700, 300), 24, False, device)
    q, k, v = rows_of(T, (16, 8, 128), torch.float16, device)
    q = q * 10
    torch.testing.assert_close(
        run(q, k, v, tables).float(), softmax_by_hand(q, k, v, tables.cu_seqlens), **ATTENTION["bf16"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_prompt_keeps_its_nan(heads: tuple[int, int, int], device: torch.device) -> None:
    tables, T = tables_of((100, 200, 61, 64, 333), 9, False, device)
    q, k, v = rows_of(T, heads, torch.bfloat16, device)
    wanted = run(q, k, v, tables)
    for a, b in itertools.pairwise(tables.cu_seqlens.tolist()):
        other_k, other_v = k.clone(), v.clone()
        other_k[a:b] = math.nan
        other_v[a:b] = math.nan
        o = run(q, other_k, other_v, tables)
        assert torch.equal(o[:a], wanted[:a])
        assert torch.equal(o[b:], wanted[b:])


@pytest.mark.gpu
def test_a_graph_takes_other_lengths(device: torch.device) -> None:
    """Captured on nothing but padding, as the engine does; then filled again and again."""
    layout = TableLayout(PrefillShape(3072, 4, 3072), 64)
    flat = layout.host([]).to(device)
    tables = layout.tables(flat)
    q, k, v = rows_of(3072, (16, 8, 128), torch.bfloat16, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prompt_attention_hopper(q, k, v, tables, 128**-0.5)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [prompt_attention_hopper(q, k, v, tables, 128**-0.5) for _ in range(3)]
    for lengths in ((3072,), (1, 2, 3), (1000, 1000, 1000, 72), (), (1500, 0, 1501)):
        prompts = [NewTokens(np.zeros(n, np.int32), 0, i, []) for i, n in enumerate(lengths)]
        flat.copy_(layout.host(prompts))
        for o in outputs:
            o.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        wanted = softmax_by_hand(q, k, v, tables.cu_seqlens)
        torch.testing.assert_close(outputs[0].float(), wanted, **ATTENTION["bf16"])
        assert all(torch.equal(o, outputs[0]) for o in outputs)


def test_what_it_takes() -> None:
    """On a CPU nothing; the rest is told by shapes."""
    q, k = torch.zeros(4, 4, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    tables, _ = tables_of((4,), 0, False, torch.device("cpu"))
    assert not supports(q, k, k, tables)
