"""Selection against a sorted Python list, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onela import ShapeError
from onela.ops.beam_select import beam_select_ref
from onela.ops.beam_select.reference import _segment_logsumexp

NORMALIZERS = st.sampled_from(["level", "allowed", "given"])


def by_hand(
    logits: torch.Tensor,
    cum: list[float],
    rows: range,
    width: int,
    nodes: list[int],
    children: list[list[int]] | None,
    norms: torch.Tensor,
) -> list[tuple[int, int, float]]:
    """(row, code, score) of the survivors of one request, in the order of the contract."""
    candidates = []
    for row in rows:
        scores = torch.tensor(cum[row]) + (logits[row] - norms[row])
        candidates += [
            (row, code, float(scores[code])) for code in legal_codes(row, logits, cum, nodes, children)
        ]
    best = sorted(candidates, key=lambda c: (-c[2], c[0], c[1]))[:width]
    return sorted(best)


def legal_codes(
    row: int, logits: torch.Tensor, cum: list[float], nodes: list[int], children: list[list[int]] | None
) -> list[int]:
    """What a row may choose from; nothing when it is dead."""
    if nodes[row] < 0 or cum[row] == -math.inf:
        return []
    return list(range(logits.shape[1])) if children is None else children[nodes[row]]


def allowed_norms(logits: torch.Tensor, legal: list[list[int]]) -> torch.Tensor:
    """[N], over the codes that each row may choose from.

    They are summed as the reference sums them: rows with the same values in another order tie or not by the last bit of
    it, which on some processors depends on a value's place. Held against torch's own, row by row.
    """
    rows = torch.tensor([row for row, codes in enumerate(legal) for _ in codes], dtype=torch.int64)
    codes = torch.tensor([code for codes in legal for code in codes], dtype=torch.int64)
    norms = _segment_logsumexp(logits[rows, codes], rows, len(legal))
    for row, codes_of_row in enumerate(legal):
        expected = logits[row, codes_of_row].logsumexp(0) if codes_of_row else torch.tensor(0.0)
        torch.testing.assert_close(norms[row], expected, rtol=0, atol=1e-6)
    return norms


@given(data=st.data(), seed=st.integers(0, 2**20), constrained=st.booleans(), normalizer=NORMALIZERS)
@settings(max_examples=120, deadline=None)
def test_equals_sorting(data: st.DataObject, seed: int, constrained: bool, normalizer: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    outs = [data.draw(st.integers(0, 12)) for _ in widths]
    N, C, num_nodes = sum(widths), data.draw(st.integers(1, 6)), 4
    # Few distinct values: ties are the rule, not the exception.
    logits = torch.randint(0, 3, (N, C), generator=generator).float()
    cum = [(-1.0 * int(x)) if x < 3 else -math.inf for x in torch.randint(0, 4, (N,), generator=generator)]
    nodes = torch.randint(-1, num_nodes, (N,), generator=generator).tolist()
    children = offsets = codes = None
    if constrained:
        children = [
            sorted(
                torch.randperm(C, generator=generator)[
                    : int(torch.randint(0, C + 1, (), generator=generator))
                ].tolist()
            )
            for _ in range(num_nodes)
        ]
        offsets = torch.tensor([0, *torch.tensor([len(c) for c in children]).cumsum(0).tolist()])
        codes = torch.tensor([code for c in children for code in c], dtype=torch.int32)
    given_norm = torch.randn(N, generator=generator)
    bounds = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32)
    out_bounds = torch.tensor([0, *torch.tensor(outs).cumsum(0).tolist()], dtype=torch.int32)
    parents, chosen, scores, child_nodes = beam_select_ref(
        logits,
        cum_logprobs=torch.tensor(cum),
        cu_rows=bounds,
        cu_out=out_bounds,
        trie_nodes=torch.tensor(nodes, dtype=torch.int64),
        child_offsets=offsets,
        child_codes=codes,
        normalizer=given_norm if normalizer == "given" else normalizer,  # type: ignore[arg-type]
    )
    if normalizer == "allowed":
        norms = allowed_norms(logits, [legal_codes(row, logits, cum, nodes, children) for row in range(N)])
    else:
        norms = given_norm if normalizer == "given" else logits.logsumexp(-1)
    for r in range(len(widths)):
        rows = range(int(bounds[r]), int(bounds[r + 1]))
        expected = by_hand(logits, cum, rows, outs[r], nodes, children, norms)
        at = int(out_bounds[r])
        for i, (row, code, score) in enumerate(expected):
            assert (int(parents[at + i]), int(chosen[at + i])) == (row, code)
            assert float(scores[at + i]) == pytest.approx(score, abs=1e-5)
            if children is not None and offsets is not None:
                assert int(child_nodes[at + i]) == int(offsets[nodes[row]]) + children[nodes[row]].index(code)
        for i in range(len(expected), outs[r]):
            assert int(parents[at + i]) == int(chosen[at + i]) == int(child_nodes[at + i]) == -1
            assert float(scores[at + i]) == -math.inf


def test_one_of_the_trie_tables_alone_is_refused() -> None:
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ShapeError, match="child_offsets and child_codes"):
        beam_select_ref(
            torch.zeros(1, 2),
            cum_logprobs=torch.zeros(1),
            cu_rows=bounds,
            cu_out=bounds,
            trie_nodes=torch.zeros(1, dtype=torch.int64),
            child_offsets=torch.tensor([0, 1]),
        )
