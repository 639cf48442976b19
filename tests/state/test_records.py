"""Extents of slots and the spare slots beside them: who may write where, and when there is room."""

from __future__ import annotations

import pytest
import torch

from onela import CapacityError
from onela.state import AttentionGeometry, GatedDeltaGeometry, Records

LAYERS = (GatedDeltaGeometry(1, 1, 2, 2), AttentionGeometry(1, 2))


def records(max_slots: int | None = None) -> Records:
    kind = torch.float32
    return Records(LAYERS, dtype=kind, record_dtype=kind, device=torch.device("cpu"), max_slots=max_slots)


def ranges(held: Records, *extents: tuple[int, int]) -> list[range]:
    return [range(start, start + size) for start, size in [*extents, (held.spare_start, held.spare_size)]]


def disjoint(ranges: list[range]) -> bool:
    return len({slot for one in ranges for slot in one}) == sum(map(len, ranges))


def test_spare_slots_are_nobodys_and_grow_with_the_requests() -> None:
    held = records()
    extents: list[tuple[int, int]] = []
    for number in range(1, 9):
        extents.append((held.admit(5, 2 * number), 5))
        assert held.spare_size >= 2 * number
        assert disjoint(ranges(held, *extents))
        assert held.slots.end <= held.pool.capacity
    for extent in extents:
        held.free(*extent)
    held.free_spare()
    assert held.slots.num_taken == 0


def test_spare_slots_move_rarely() -> None:
    held = records()
    places = set()
    for number in range(1, 65):
        held.admit(0, number)
        places.add((held.spare_start, held.spare_size))
    assert len(places) == 7


def test_spare_slots_make_room_when_a_request_needs_it() -> None:
    held = records(max_slots=20)
    first = held.admit(4, 16)
    assert not held.fits(1, 16)
    held.free(first, 4)
    # Alone, a request may take what all the others' last steps took before.
    assert held.fits(15, 5)
    start = held.admit(15, 5)
    assert (held.spare_size, held.slots.num_taken) == (5, 20)
    assert disjoint(ranges(held, (start, 15)))
    with pytest.raises(CapacityError, match="1 adjoining places and 5 spare ones asked for, 0 of 20 free"):
        held.admit(1, 5)
    assert (held.spare_size, held.slots.num_taken) == (5, 20)


def test_no_memory_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    held = records()
    start = held.admit(4, 2)
    before = (held.spare_start, held.spare_size)

    def none_left(capacity: int) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(held.pool, "reserve", none_left)
    with pytest.raises(torch.OutOfMemoryError):
        held.admit(100, 50)
    assert (held.spare_start, held.spare_size) == before
    assert held.slots.num_taken == 6
    held.free(start, 4)
