"""Extents and pages: never given twice, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onela import CapacityError
from onela.state.allocator import ExtentAllocator, PageAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_extents_never_overlap(moves: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator("slots", limit=40)
    held: list[tuple[int, int]] = []
    for take, size in moves:
        if take or not held:
            if allocator.fits(size):
                held.append((allocator.allocate(size), size))
            else:
                with pytest.raises(CapacityError, match="slots"):
                    allocator.allocate(size)
        else:
            allocator.free(*held.pop(size % len(held)))
        places = [place for start, count in held for place in range(start, start + count)]
        assert len(places) == len(set(places)) == allocator.num_taken
        assert all(0 <= place < 40 for place in places)
        assert allocator.end == max(places, default=-1) + 1


def test_a_gap_is_used_again() -> None:
    allocator = ExtentAllocator("slots")
    first, second, third = allocator.allocate(3), allocator.allocate(2), allocator.allocate(4)
    allocator.free(second, 2)
    assert allocator.allocate(3) == 9
    assert allocator.allocate(2) == second
    assert (first, third) == (0, 5)


def test_shared_pages_come_back_with_their_last_user() -> None:
    pages = PageAllocator("pages", limit=3)
    taken = pages.allocate(2)
    pages.share(taken)
    pages.free(taken)
    assert pages.num_taken == 2
    with pytest.raises(CapacityError, match=r"2 asked for, 1 of 3 free"):
        pages.allocate(2)
    pages.free(taken)
    assert pages.num_taken == 0
    assert sorted(pages.allocate(3)) == [0, 1, 2]
