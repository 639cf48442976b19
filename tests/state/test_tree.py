"""The ancestry index against a dictionary of histories."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onela.state import BeamTree

widths = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(widths=widths, seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_ancestors_are_the_slots_of_the_path(widths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = BeamTree.root(widths[0], torch.device("cpu"))
    paths: list[list[int] | None] = [[] for _ in range(widths[0])]
    slot = 0
    for width in widths[1:]:
        slots = torch.arange(slot, slot + tree.width, dtype=torch.int32)
        slot += tree.width
        parents = torch.randint(-1, tree.width, (width,), generator=generator)
        alive = [p >= 0 and paths[p] is not None for p in parents.tolist()]
        parents = parents.masked_fill(~torch.tensor(alive), -1)
        paths = [[*(paths[p] or []), int(slots[p])] if p >= 0 else None for p in parents.tolist()]
        tree = tree.advance(parents, int(slots[0]))
        assert tree.depth == len(next((p for p in paths if p is not None), [0] * tree.depth))
        for row, path in zip(tree.ancestors.tolist(), paths):
            assert row == (path if path is not None else [-1] * tree.depth)


def test_advancing_leaves_the_tree_before_as_it_was() -> None:
    before = BeamTree.root(2, torch.device("cpu"))
    after = before.advance(torch.tensor([1, 1, 0]), 7)
    assert before.depth == 0
    assert after.ancestors.tolist() == [[8], [8], [7]]
    assert after.ancestors.dtype == torch.int32
