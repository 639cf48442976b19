"""Attention of packed prompts on the tables of a padded shape, against the reference over the prompts alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onela.ops.attention import prefill_attention_ref
from onela.ops.prefill_tables import NewTokens, PrefillShape, PrefillTables, TableLayout
from tests.tolerances import ATTENTION

pytest.importorskip("triton")
from onela.ops.attention import prefill

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

PAGE = 16
# New tokens and cached ones of each prompt.
PROMPTS = [
    [(70, 0), (3, 0)],
    [(1, 0)],
    [(33, 5), (1, 2), (2, 64), (40, 0)],
    [(5, 16), (17, 0), (1, 31)],
]


def flash_by_hand(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """What flash attention does, sequence by sequence: it runs on a GPU alone."""
    o = torch.zeros_like(q)
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        if a == b:
            continue
        o[a:b] = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None].float() for x in (q[a:b], k[a:b], v[a:b])),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return o


def pages_of(prompts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Pages in no order."""
    counts = [-(-(new + cached) // PAGE) for new, cached in prompts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    return [[order.pop() for _ in range(count)] for count in counts]


def shape_of(prompts: Sequence[tuple[int, int]], padding: int, rectangle: bool) -> PrefillShape:
    longest = max(padding, *(new for new, _ in prompts))
    if rectangle:
        return PrefillShape(
            (longest + padding) * len(prompts), len(prompts), longest + padding, rectangle=True
        )
    total, goes_on = sum(new for new, _ in prompts) + padding, any(cached for _, cached in prompts)
    return PrefillShape(total, len(prompts) + 2, longest, goes_on)


def tables_of(
    prompts: Sequence[tuple[int, int]], shape: PrefillShape, device: torch.device
) -> tuple[PrefillTables, Tensor]:
    """The tables, and the rows of the prompts' tokens."""
    layout = TableLayout(shape, PAGE)
    tokens = [
        NewTokens(np.zeros(new, np.int32), cached, i, pages)
        for i, ((new, cached), pages) in enumerate(zip(prompts, pages_of(prompts)))
    ]
    tables = layout.tables(layout.host(tokens).to(device))
    step = 2 if shape.rectangle else 1
    starts = tables.cu_seqlens.tolist()[::step]
    rows = [start + i for start, (new, _) in zip(starts, prompts) for i in range(new)]
    return tables, torch.tensor(rows, device=device)


@pytest.mark.parametrize(
    ("prompts", "rectangle"),
    [*((p, False) for p in PROMPTS), (PROMPTS[0], True), (PROMPTS[1], True)],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 2, 32), (2, 2, 256), (8, 1, 64)], ids=str)
@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("last_only", [False, True])
def test_padded_prompts_equal_the_reference(
    prompts: list[tuple[int, int]],
    rectangle: bool,
    heads: tuple[int, int, int],
    padding: int,
    last_only: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(prefill, "flash_attention", flash_by_hand)
        monkeypatch.setattr(prefill, "refused", lambda *_: None)
    HQ, HKV, D = heads
    # The interpreter's bf16 is not numpy's.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator().manual_seed(len(prompts))
    shape, B = shape_of(prompts, padding, rectangle), len(prompts)
    tables, rows = tables_of(prompts, shape, device)
    T = shape.num_tokens

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    wide = random(T, (HQ + 2 * HKV) * D)
    q, k, v = wide.split([HQ * D, HKV * D, HKV * D], dim=-1)
    q, k, v = (x.reshape(T, -1, D) for x in (q, k, v))
    pages = pages_of(prompts)
    table = torch.full((B, 8), -1, dtype=torch.int32)
    for row, own in zip(table, pages):
        row[: len(own)] = torch.tensor(own)
    caches = [random(sum(map(len, pages)) + 1, PAGE, HKV, D) for _ in range(2)]
    given, expected = [c.clone() for c in caches], [c.clone() for c in caches]
    last = torch.tensor(np.cumsum([new for new, _ in prompts]) - 1, device=device)
    # The rows of unused prompts ask for something too, and get anything.
    unused = q[:1].expand(shape.num_prompts - B, -1, -1)
    asked = torch.cat([q[rows][last], unused]) if last_only else q
    o = prefill.prefill_attention_packed(
        asked,
        k,
        v,
        k_cache=given[0],
        v_cache=given[1],
        page_table=table.to(device),
        last_only=last_only,
        tables=tables,
    )
    wanted = prefill_attention_ref(
        q[rows][last] if last_only else q[rows],
        k[rows],
        v[rows],
        k_cache=expected[0],
        v_cache=expected[1],
        page_table=table.to(device),
        cached_lens=torch.tensor([cached for _, cached in prompts], dtype=torch.int32),
        cu_seqlens=torch.tensor(np.cumsum([0, *(new for new, _ in prompts)]), dtype=torch.int32),
        prompts=torch.arange(B, dtype=torch.int32),
        last_only=last_only,
    )
    assert o.shape == asked.shape
    given_rows = o[:B] if last_only else o[rows]
    torch.testing.assert_close(given_rows, wanted, **ATTENTION["bf16"])
    for cache, other in zip(given, expected):
        assert torch.equal(cache, other)
