"""Places in ascending arrays, against numpy's binary search and a plain list of owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onela.items.lookup import SortedKeys, Stretches

INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20), st.integers(2**40, 2**40 + 9))
UINT64 = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 20), st.integers(2**63 - 5, 2**63 + 5))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(("numbers", "dtype"), [(INT64, np.int64), (UINT64, np.uint64)])
def test_keys_are_found_where_a_binary_search_finds_them(
    numbers: st.SearchStrategy[int], dtype: type[np.generic], data: st.DataObject
) -> None:
    keys = np.sort(np.array(data.draw(st.lists(numbers, min_size=1, max_size=60)), dtype=dtype))
    others = np.array(data.draw(st.lists(numbers, max_size=30)), dtype=dtype)
    lookup = SortedKeys(keys)
    assert np.array_equal(lookup.find(keys), np.searchsorted(keys, keys))  # the first of equal ones
    places = lookup.find(others)
    assert places.dtype == np.int64
    assert np.array_equal(keys[places] == others, np.isin(others, keys))
    known = np.isin(others, keys)
    assert np.array_equal(places[known], np.searchsorted(keys, others[known]))


@pytest.mark.parametrize("spread", ["dense", "clusters", "hashes"])
def test_keys_are_found_however_they_are_spread(spread: str) -> None:
    chance = np.random.default_rng(0)
    keys: np.ndarray = np.arange(-5000, 5000)
    if spread == "clusters":
        keys = np.concatenate([keys, 2**60 + keys])
    elif spread == "hashes":
        keys = np.sort(chance.integers(0, 2**64, size=10_000, dtype=np.uint64, endpoint=False))
    wanted = chance.permutation(keys)
    assert np.array_equal(SortedKeys(keys).find(wanted), np.searchsorted(keys, wanted))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), wide=st.booleans())
def test_every_member_lies_in_its_stretch(lengths: list[int], wide: bool) -> None:
    offsets = np.cumsum([0, *lengths]).astype(np.int64 if wide else np.int32)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    stretches = Stretches(offsets)
    assert np.array_equal(stretches.of(np.arange(len(owners))), owners)
    assert stretches.of(np.zeros(0, dtype=np.int64)).tolist() == []
