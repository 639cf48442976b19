"""ItemCatalog against a plain dictionary of lists."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onela.errors import CatalogError, ConfigError
from onela.items import CatalogItem, ItemCatalog, SidVocabulary

WEIGHTS = st.none() | st.sampled_from([0.0, 1.0, -2.0, 7.5])
INT_IDS = st.integers(-(2**63), 2**63 - 1)
STR_IDS = st.text(st.sampled_from("ab\0\u00e9"), max_size=12)


@st.composite
def item_lists(draw: st.DrawFn) -> list[CatalogItem]:
    num_levels = draw(st.integers(1, 4))
    ids = draw(st.sampled_from([INT_IDS, STR_IDS]))
    item = st.builds(
        CatalogItem,
        ids,
        st.tuples(*[st.integers(0, 2)] * num_levels),  # few SIDs, so that many items share one
        st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
        st.none() | st.dictionaries(st.text("ab"), st.integers() | st.none(), max_size=2),
        WEIGHTS,
    )
    return draw(st.lists(item, min_size=1, max_size=30, unique_by=lambda item: item.item_id))


def witness(items: list[CatalogItem]) -> dict[tuple[int, ...], list[CatalogItem]]:
    by_sid: dict[tuple[int, ...], list[CatalogItem]] = {}
    for item in sorted(items, key=lambda item: (tuple(item.sid), -(item.weight or 0.0), item.item_id)):
        by_sid.setdefault(tuple(item.sid), []).append(item)  # type: ignore[arg-type]
    return by_sid


def same(record: CatalogItem, item: CatalogItem, any_weight: bool) -> bool:
    weight = (item.weight or 0.0) if any_weight else None
    return record == CatalogItem(item.item_id, item.sid, item.title, item.metadata, weight)


def check(catalog: ItemCatalog, items: list[CatalogItem]) -> None:
    expected = witness(items)
    any_weight = any(item.weight is not None for item in items)
    assert (
        (catalog.num_items, catalog.num_sids) == (len(items), len(expected)) == (len(catalog), len(expected))
    )
    assert catalog.max_items_per_sid == max(map(len, expected.values()))
    sids = np.array(list(expected))
    assert catalog.lookup(sids).tolist() == list(range(len(sids)))
    assert catalog.sids(np.arange(len(sids))).tolist() == sids.tolist()
    for sid_index, on_sid in enumerate(expected.values()):
        rows = catalog.items_of(sid_index)
        assert [catalog.item_id(row) for row in rows] == [item.item_id for item in on_sid]
        assert catalog.items_of(sid_index, expand="best") == rows[:1]
        for row, item in zip(rows, on_sid):
            assert catalog.find(item.item_id) == row
            assert item.item_id in catalog
            assert catalog.sid_index_of(row) == sid_index
            assert same(catalog.record(row), item, any_weight)
            assert (catalog.title(row), catalog.metadata(row)) == (item.title, item.metadata)
            assert catalog.weight(row) == (item.weight or 0.0)
    order = np.array([*range(len(sids) - 1, -1, -1), 0])
    bounds, rows = catalog.items_at(order)
    assert [rows[a:b].tolist() for a, b in itertools.pairwise(bounds)] == [catalog.items_of(i) for i in order]
    assert catalog.item_ids(rows) == [catalog.item_id(row) for row in rows]
    assert catalog.titles(rows) == [catalog.title(row) for row in rows]
    records = list(catalog.records())
    assert [record.item_id for record in records] == [item.item_id for on in expected.values() for item in on]
    assert records == [catalog.record(row) for row in range(len(items))]


def test_many_sids_at_once_are_checked() -> None:
    catalog = ItemCatalog.from_items([CatalogItem("a", (0, 0)), CatalogItem("b", (0, 1))])
    for wrong in (-1, 2):
        with pytest.raises(CatalogError, match=r"out of range 0\.\.1"):
            catalog.items_at(np.array([0, wrong]))
    bounds, rows = catalog.items_at(np.array([], dtype=np.int64))
    assert (bounds.tolist(), rows.tolist(), catalog.item_ids(rows)) == ([0], [], [])


@settings(max_examples=60)
@given(item_lists())
def test_is_the_dictionary(items: list[CatalogItem]) -> None:
    check(ItemCatalog.from_items(items), items)


@settings(max_examples=30)
@given(item_lists())
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, items: list[CatalogItem]) -> None:
    path = tmp_path_factory.mktemp("catalog") / "saved"
    catalog = ItemCatalog.from_items(items)
    catalog.save(path)
    loaded = ItemCatalog.load(path)
    assert loaded.version == catalog.version
    check(loaded, items)


@settings(max_examples=40)
@given(item_lists(), st.randoms(use_true_random=False))
def test_version_is_of_the_content(items: list[CatalogItem], rng: random.Random) -> None:
    version = ItemCatalog.from_items(items).version
    shuffled = items.copy()
    rng.shuffle(shuffled)
    assert ItemCatalog.from_items(shuffled).version == version
    first = items[0]
    changed = [
        CatalogItem(first.item_id, (*first.sid[:-1], 3), first.title, first.metadata, first.weight),
        CatalogItem(first.item_id, first.sid, "another title", first.metadata, first.weight),
        CatalogItem(first.item_id, first.sid, first.title, {"another": 1}, first.weight),
        CatalogItem(first.item_id, first.sid, first.title, first.metadata, 8.0),
    ]
    for other in changed:
        assert ItemCatalog.from_items([other, *items[1:]]).version != version
    assert len(items) == 1 or ItemCatalog.from_items(items[1:]).version != version


def test_from_arrays_is_from_items() -> None:
    rng = np.random.default_rng(0)
    sids = rng.integers(0, 12, (2000, 3))
    ids = rng.permutation(5000)[:2000]
    weights = rng.integers(0, 3, 2000).astype(np.float32)
    titles = [None if n % 3 == 0 else f"t{n}" for n in range(2000)]
    metadata = [None if n % 2 else {"n": n} for n in range(2000)]
    items = [
        CatalogItem(int(i), tuple(s), t, m, float(w))
        for i, s, t, m, w in zip(ids, sids.tolist(), titles, metadata, weights)
    ]
    by_arrays = ItemCatalog.from_arrays(ids, sids, titles=titles, metadata=metadata, weights=weights)
    check(by_arrays, items)
    named = ItemCatalog.from_arrays([f"item {i}" for i in ids], sids, weights=weights)
    check(named, [CatalogItem(f"item {i.item_id}", i.sid, None, None, i.weight) for i in items])


def test_many_string_ids() -> None:
    """Order within a SID and search by id, at a size where a slip in the vectorised sorts would show."""
    rng = np.random.default_rng(1)
    sids = rng.integers(0, 45, (100_000, 3), dtype=np.int32)
    ids = [f"B{n:07d}" for n in rng.permutation(10**6)[:100_000]]
    catalog = ItemCatalog.from_arrays(ids, sids)
    assert catalog.num_sids == len(np.unique(sids, axis=0)) < 100_000
    order = sorted(range(100_000), key=lambda row: (*sids[row].tolist(), ids[row]))
    assert [catalog.item_id(item) for item in range(100_000)] == [ids[row] for row in order]
    for row in rng.integers(0, 100_000, 200):
        item = catalog.find(ids[row])
        assert item is not None
        assert catalog.item_id(item) == ids[row]
        assert catalog.sids([catalog.sid_index_of(item)]).tolist() == [sids[row].tolist()]
    assert catalog.find("B") is None


# ---- binding to a vocabulary


def holed_vocabulary() -> SidVocabulary:
    return SidVocabulary.from_token_ids(
        [[9, 8, 7, 6], [1, 2, 3], [20, 21, 22]], codes=[[0, 2, 5, 300], [1, 4, 6], [0, 1, 2]]
    )


def test_bound_trie_speaks_indices() -> None:
    vocabulary = holed_vocabulary()
    items = [CatalogItem("x", (5, 4, 0)), CatalogItem("y", (0, 6, 2)), CatalogItem("z", (300, 1, 1))]
    bound = ItemCatalog.from_items(items, vocabulary)
    unbound = ItemCatalog.from_items(items)
    assert (bound.vocabulary, unbound.vocabulary) == (vocabulary, None)
    assert bound.codebook_sizes == (4, 3, 3)
    assert unbound.codebook_sizes == (301, 7, 3)
    assert bound.version == unbound.version
    assert bound.trie.sids(np.arange(3)).tolist() == [[0, 2, 2], [2, 1, 0], [3, 0, 1]]
    assert bound.lookup(vocabulary.encode([item.sid for item in items])).tolist() == [1, 0, 2]
    assert unbound.lookup([item.sid for item in items]).tolist() == [1, 0, 2]
    for catalog in (bound, unbound, unbound.bind(vocabulary)):
        assert catalog.sids(np.arange(3)).tolist() == [[0, 6, 2], [5, 4, 0], [300, 1, 1]]
        assert [record.item_id for record in catalog.records()] == ["y", "x", "z"]


def test_binding_again_starts_from_published_codes(tmp_path: Path) -> None:
    bound = ItemCatalog.from_items(
        [CatalogItem("x", (5, 4, 0)), CatalogItem("y", (300, 1, 2))], holed_vocabulary()
    )
    other = SidVocabulary.from_token_ids([range(400), range(400, 407), range(500, 503)])
    again = bound.bind(other)
    assert again.codebook_sizes == (400, 7, 3)
    assert again.trie.sids([0, 1]).tolist() == [[5, 4, 0], [300, 1, 2]]
    bound.save(tmp_path / "c")
    assert ItemCatalog.load(tmp_path / "c").trie.sids([0]).tolist() == [[5, 4, 0]]
    assert ItemCatalog.load(tmp_path / "c", holed_vocabulary()).trie.sids([0]).tolist() == [[2, 1, 0]]


def test_binding_shares_memory_where_codes_are_indices() -> None:
    catalog = ItemCatalog.from_arrays([1, 2], [[0, 1], [3, 0]])
    bound = catalog.bind(SidVocabulary.from_token_ids([range(8), range(10, 14)]))
    assert bound.codebook_sizes == (8, 4)
    for ours, theirs in zip(
        (*catalog.trie.codes, *catalog.trie.offsets), (*bound.trie.codes, *bound.trie.offsets)
    ):
        assert np.shares_memory(ours, theirs)
    # The first level has a hole above every code in use, the second below one: only that one is copied.
    holed = SidVocabulary.from_token_ids([[0, 1, 2, 3], [4, 5]], codes=[[0, 1, 3, 9], [0, 1]])
    mixed = catalog.bind(holed)
    assert mixed.trie.sids([0, 1]).tolist() == [[0, 1], [2, 0]]
    assert np.shares_memory(mixed.trie.codes[1], catalog.trie.codes[1])


def test_binding_refuses() -> None:
    catalog = ItemCatalog.from_items([CatalogItem("x", (5, 4, 0)), CatalogItem("late", (5, 5, 1))])
    with pytest.raises(
        CatalogError, match="item_id 'late': code 5 of level 1 has no token in the vocabulary"
    ):
        catalog.bind(holed_vocabulary())
    with pytest.raises(CatalogError, match="the catalogue has 3 levels, the vocabulary 1"):
        catalog.bind(SidVocabulary.from_token_ids([[1, 2]]))
    small = SidVocabulary.from_token_ids([range(6), [10], [20, 21]])
    with pytest.raises(CatalogError, match=r"code 4 of level 1 .*; 2 codes of this level have none"):
        catalog.bind(small)


# ---- duplicates


def duplicated() -> list[CatalogItem]:
    return [
        CatalogItem("a", (1, 1), weight=1.0),
        CatalogItem("b", (1, 2)),
        CatalogItem("a", (2, 2), weight=5.0, title="kept"),
        CatalogItem("b", (1, 2), title="second"),
        CatalogItem("a", (3, 3), weight=5.0),
    ]


def test_an_id_that_no_catalogue_can_hold_is_not_found() -> None:
    catalog = ItemCatalog.from_items([CatalogItem("a", (1, 1)), CatalogItem("b", (1, 2))])
    half_a_pair = "\ud800"
    assert catalog.find(half_a_pair) is None
    assert half_a_pair not in catalog
    assert catalog.find_many(["b", half_a_pair, "a"]).tolist() == [1, -1, 0]


def test_a_duplicate_item_is_refused_with_both_lines() -> None:
    with pytest.raises(CatalogError, match="item_id 'a' is there already, on line 1") as caught:
        ItemCatalog.from_items(duplicated())
    assert caught.value.line == 3
    # The same SID twice makes it no less a duplicate.
    with pytest.raises(CatalogError, match="item_id 'b' is there already, on line 1") as caught:
        ItemCatalog.from_items([duplicated()[1], duplicated()[3]])
    assert caught.value.line == 2


def test_duplicates_best_keeps_the_heaviest_then_the_first() -> None:
    catalog = ItemCatalog.from_items(duplicated(), duplicates="best")
    check(catalog, [duplicated()[1], duplicated()[2]])
    ids = np.array([4, 4, 3, 4])
    unweighted = ItemCatalog.from_arrays(ids, [[1], [2], [3], [0]], duplicates="best")
    assert [(record.item_id, record.sid) for record in unweighted.records()] == [(4, (1,)), (3, (3,))]


def test_strings_that_share_a_hash_are_two_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair of short strings is known to collide; a hash of the length alone makes plenty."""
    monkeypatch.setattr("onela.items.columns.hash_string", lambda text: len(text.encode()))
    monkeypatch.setattr(
        "onela.items.columns.StringColumn.hashes", lambda column: np.diff(column.offsets).astype(np.uint64)
    )
    items = [CatalogItem(name, (n % 2,), name.upper()) for n, name in enumerate(["ab", "cd", "e", "ef", "g"])]
    check(ItemCatalog.from_items(items), items)
    assert ItemCatalog.from_items(items).find("xy") is None
    with pytest.raises(CatalogError, match="item_id 'cd' is there already, on line 2") as caught:
        ItemCatalog.from_items([*items, CatalogItem("cd", (0,))])
    assert caught.value.line == 6


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [[1, 2], [3, 4]]), "item_ids: 1 entries, but sids has 2"),
        (([1, 2], [1, 2]), r"sids: expected integers of shape \[M, num_levels\], got int64 \[2\]"),
        (([1, 2], [[0.5], [1.0]]), "sids: expected integers"),
        (([1, 2], [[0, 1], [2, True]]), r"sids: \[2, True\] has a boolean, expected integers"),
        (
            ([1, 2], [[0, 1], [2, np.True_]]),
            r"item 2: sids: \[2, .*True.*\] has a boolean, expected integers",
        ),
        (([1, 2], [np.array([0, 1]), np.array([False, True])]), "item 2: sids: .* has a boolean"),
        (([1, 2], [[0, 1], [2, [1]]]), r"item 2: sids: \[2, \[1\]\] has a list, expected integers"),
        (([True, 2], [[0, 1], [2, 1]]), "item_id: expected all strings or all integers, got True"),
        (([1, 2], np.zeros((2, 0), dtype=np.int32)), "sids: expected integers"),
        (([1, 2], [[1], [-2]]), "line 2|code -2 of level 0 is out of range"),
        (([], np.zeros((0, 3), dtype=np.int32)), "no item in it"),
        (([1, "2"], [[1], [2]]), "expected all strings or all integers, got '2'"),
        (([1, 2], [[1, 2], [3]]), r"item 2: sids: \[3\] has 1 levels, expected 2"),
        (("ab", [[1], [2]]), "item_ids: a list is expected, got 'ab'"),
        ((None, [[1], [2]]), "item_ids: a list is expected, got None"),
        ((["a", "\ud800"], [[1], [2]]), r"item 2: item_id: '\\ud800' is not valid Unicode"),
    ],
)
def test_from_arrays_refuses(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        ItemCatalog.from_arrays(*arguments)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"titles": ["x", 5]}, "item 2: titles: expected a string, got 5"),
        ({"titles": ["x", 0]}, "item 2: titles: expected a string, got 0"),
        ({"titles": [None, "\ud800"]}, r"item 2: titles: '\\ud800' is not valid Unicode"),
        ({"titles": "xy"}, "titles: a list is expected, got 'xy'"),
        ({"titles": 5}, "titles: a list is expected, got 5"),
        ({"metadata": {"a": 1, "b": 2}}, "metadata: a list is expected, got {'a': 1, 'b': 2}"),
        ({"metadata": [{}, {"a": {1}}]}, "item 2: metadata: Object of type set is not JSON serializable"),
        ({"weights": [1, "a"]}, "item 2: weights: expected a number, got 'a'"),
        ({"weights": [1, 10**400]}, "item 2: weights: expected a number, got 10000"),
        ({"weights": [1, [2]]}, r"item 2: weights: expected a number, got \[2\]"),
        ({"weights": [1, "2"]}, "item 2: weights: expected a number, got '2'"),
        ({"weights": [0.5, True]}, "item 2: weights: expected a number, got True"),
        ({"weights": np.array([True, False])}, "item 1: weights: expected a number, got"),
        ({"weights": np.array(["1", "a"])}, "item 1: weights: expected a number, got"),
        ({"weights": np.ones((2, 2))}, "item 1: weights: expected a number, got"),
        ({"weights": np.ones((0, 2))}, "weights: a list of numbers is expected, got"),
        ({"weights": 5}, "weights: a list is expected, got 5"),
        ({"weights": np.array(5.0)}, "weights: a list is expected, got array"),
    ],
)
def test_from_arrays_names_what_a_column_may_not_hold(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        ItemCatalog.from_arrays([1, 2], [[1], [2]], **columns)


def test_items_may_hold_numpys_values() -> None:
    """As rows of a data frame do."""
    ids, sids, weights = np.array([5, 7]), np.array([[1, 2], [3, 4]]), np.array([0.5, 2], dtype=np.float32)
    mappings = [{"item_id": i, "sid": s, "weight": w} for i, s, w in zip(ids, sids, weights)]
    items = [CatalogItem(i, tuple(s), weight=w) for i, s, w in zip(ids, sids, weights)]
    expected = ItemCatalog.from_arrays(ids, sids, weights=weights).version
    assert ItemCatalog.from_items(mappings).version == ItemCatalog.from_items(items).version == expected
    with pytest.raises(CatalogError, match="sid: True is not an integer code"):
        ItemCatalog.from_items([{"item_id": 1, "sid": np.array([True])}])
    with pytest.raises(CatalogError, match="items: a list of CatalogItem or of mappings is expected"):
        ItemCatalog.from_items(None)  # type: ignore[arg-type]


def test_from_arrays_takes_arrays_of_others_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's elements, gone through one by one, take minutes for millions; a data frame's are its columns."""
    expected = ItemCatalog.from_arrays([1, 2], [[1, 2], [3, 4]]).version
    sids = torch.tensor([[1, 2], [3, 4]])
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "__iter__", None)
        assert ItemCatalog.from_arrays([1, 2], sids).version == expected
    assert ItemCatalog.from_arrays([1, 2], list(sids.numpy())).version == expected
    assert ItemCatalog.from_arrays([1, 2], [(1, np.int8(2)), [3, 4]]).version == expected


def test_from_arrays_refuses_columns_of_other_lengths() -> None:
    for name, column in [("titles", ["x"]), ("metadata", [None] * 3), ("weights", [1.0])]:
        with pytest.raises(CatalogError, match=f"{name}: {len(column)} entries, but sids has 2"):
            ItemCatalog.from_arrays([1, 2], [[1], [2]], **{name: column})  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    catalog = ItemCatalog.from_arrays([10, 20], [[1], [2]])
    for sid_index in (-1, 2):
        with pytest.raises(CatalogError, match=rf"sid_index: {sid_index} is out of range 0\.\.1"):
            catalog.items_of(sid_index)
        with pytest.raises(CatalogError, match=r"sid_index: out of range 0\.\.1"):
            catalog.sids([sid_index])
        with pytest.raises(CatalogError, match=rf"item: {sid_index} is out of range 0\.\.1"):
            catalog.item_id(sid_index)
    with pytest.raises(ConfigError, match="expand: 'first', expected 'best' or 'all'"):
        catalog.items_of(0, expand="first")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="duplicates: 'drop', expected one of error, best"):
        ItemCatalog.from_arrays([1], [[1]], duplicates="drop")  # type: ignore[arg-type]
    for stranger in (11, "10", 10.0, True, 2**70, -(2**70)):
        assert catalog.find(stranger) is None  # type: ignore[arg-type]
        assert stranger not in catalog  # type: ignore[operator]
    assert 10 in catalog
    assert repr(catalog).startswith("ItemCatalog(num_items=2, num_sids=2, codebook_sizes=(3,), version=")
