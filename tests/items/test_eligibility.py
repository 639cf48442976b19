"""Filters compiled to node masks, against a loop over all items."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onela.errors import RequestError
from onela.items import Eligibility, EligibilityIndex, ItemCatalog, MaskPool
from onela.items import attributes as attributes_module
from onela.items.attributes import AttributeIndex
from onela.items.columns import StringColumn

LANGUAGES = ["en", "de", "fr"]


def build(rows: list[dict[str, Any]], name: Callable[[int], int | str] = int) -> ItemCatalog:
    return ItemCatalog.from_items(
        [{"item_id": name(i), "sid": row["sid"], "metadata": row["metadata"]} for i, row in enumerate(rows)]
    )


def node_masks(index: EligibilityIndex, eligibility: Eligibility) -> list[np.ndarray]:
    """The masks as the device holds them, unpacked."""
    pool = MaskPool(index, torch.device("cpu"))
    row = pool.acquire(eligibility)
    masks = []
    for level in range(index.num_levels):
        words = pool.level(level)[row].numpy().view(np.uint32)
        bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
        masks.append(bits.reshape(-1)[: index.catalog.trie.num_nodes(level + 1)].astype(bool))
    return masks


def brute_force(catalog: ItemCatalog, eligible: set[int]) -> list[np.ndarray]:
    """Walk from every eligible item up to the root."""
    trie = catalog.trie
    masks = [np.zeros(trie.num_nodes(level + 1), dtype=bool) for level in range(trie.num_levels)]
    for item in eligible:
        sid = trie.sids([catalog.sid_index_of(item)])[0]
        node = 0
        for level, code in enumerate(sid.tolist()):
            codes, children = trie.children(level, node)
            node = int(children[codes.tolist().index(code)])
            masks[level][node] = True
    return masks


def matches(metadata: Any, filter: dict[str, Any]) -> bool:
    if not isinstance(metadata, dict):
        return not filter
    for name, wanted in filter.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        held = metadata.get(name)
        held = held if isinstance(held, list) else [held]
        if not any(type(v) is type(h) and v == h for v in values for h in held):
            return False
    return True


metadata = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "lang": st.one_of(st.sampled_from(LANGUAGES), st.lists(st.sampled_from(LANGUAGES), max_size=3)),
            "in_stock": st.booleans(),
            "year": st.integers(0, 2),
        },
    ),
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "sid": st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)).map(list),
            "metadata": metadata,
        }
    ),
    min_size=1,
    max_size=70,
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "lang": st.one_of(
            st.sampled_from(LANGUAGES), st.lists(st.sampled_from([*LANGUAGES, "it"]), max_size=3)
        ),
        "in_stock": st.booleans(),
        "year": st.lists(st.integers(0, 3), max_size=2),
    },
)
ids = st.one_of(st.lists(st.integers(-3, 75), max_size=40), st.just([*range(75), *range(75)]))


@settings(max_examples=300, deadline=None)
@given(
    rows=rows, filter=filters, exclude=ids, allow=st.one_of(st.none(), ids), name=st.sampled_from([int, str])
)
def test_masks_are_those_of_a_loop_over_all_items(
    rows: list[dict[str, Any]],
    filter: dict[str, Any],
    exclude: list[Any],
    allow: list[Any] | None,
    name: Callable[[int], int | str],
) -> None:
    catalog = build(rows, name)
    exclude, allow = [*map(name, exclude)], None if allow is None else [*map(name, allow)]
    index = EligibilityIndex(catalog)
    filter = {name: value for name, value in filter.items() if name in index.attributes.names}
    compiled = index.compile(exclude_item_ids=exclude, allow_item_ids=allow, filter=filter)
    eligible = {
        item
        for item in range(catalog.num_items)
        if catalog.item_id(item) not in exclude
        and (allow is None or catalog.item_id(item) in allow)
        and matches(catalog.metadata(item), filter)
    }
    if compiled is None:
        assert not exclude
        assert not filter
        return
    expected = brute_force(catalog, eligible)
    for mask, wanted in zip(node_masks(index, compiled), expected):
        np.testing.assert_array_equal(mask, wanted)
    assert compiled.num_nodes == tuple(int(mask.sum()) for mask in expected)
    assert compiled.is_empty == (not eligible)
    assert np.flatnonzero(compiled.kept(np.arange(catalog.num_items))).tolist() == sorted(eligible)


@settings(max_examples=50, deadline=None)
@given(rows=rows, requests=st.lists(st.tuples(filters, ids), min_size=1, max_size=8))
def test_rows_of_a_pool_do_not_disturb_each_other(
    rows: list[dict[str, Any]], requests: list[tuple[dict[str, Any], list[int]]]
) -> None:
    index = EligibilityIndex(build(rows), max_bases=2)
    pool = MaskPool(index, torch.device("cpu"))
    held: list[tuple[int, Eligibility]] = []
    for i, (filter, exclude) in enumerate(requests):
        filter = {name: value for name, value in filter.items() if name in index.attributes.names}
        compiled = index.compile(exclude_item_ids=exclude, filter=filter)
        if compiled is not None:
            held.append((pool.acquire(compiled), compiled))
        if i % 3 == 2 and held:
            pool.release(held.pop(0)[0])
    for row, compiled in held:
        for level, mask in enumerate(node_masks(index, compiled)):
            words = pool.level(level)[row].numpy().view(np.uint32)
            bits = ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(-1)[: len(mask)]
            np.testing.assert_array_equal(bits.astype(bool), mask)
    for row, _ in held:
        pool.release(row)
    assert pool.num_taken == 0


def small() -> EligibilityIndex:
    return EligibilityIndex(
        build(
            [
                {"sid": [0, 0], "metadata": {"lang": "en", "year": 2}},
                {"sid": [0, 0], "metadata": {"lang": "de", "year": 2.0}},
                {"sid": [0, 1], "metadata": {"lang": ["en", "fr"], "in_stock": True}},
                {"sid": [1, 0], "metadata": {"lang": "fr", "in_stock": 1, "nested": {"a": 1}}},
            ]
        )
    )


def test_numbers_are_json_numbers_and_true_is_not_one() -> None:
    index = small()
    assert index.attributes.matching(index.attributes.parse({"year": 2})).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert index.attributes.matching(index.attributes.parse({"in_stock": True})).tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert index.attributes.matching(index.attributes.parse({"in_stock": 1})).tolist() == [
        False,
        False,
        False,
        True,
    ]


def test_an_item_taken_from_a_shared_sid_leaves_the_sid() -> None:
    compiled = small().compile(exclude_item_ids=[0])
    assert compiled is not None
    assert compiled.num_nodes == (2, 3)
    assert compiled.kept(np.array([0, 1])).tolist() == [False, True]


def test_an_empty_allow_list_allows_nothing() -> None:
    compiled = small().compile(allow_item_ids=[])
    assert compiled is not None
    assert compiled.is_empty


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"filter": {"colour": "red"}}, r"filter\.colour: no item .* known are in_stock, lang, year"),
        ({"filter": {"nested": "red"}}, r"filter\.nested: no item"),
        ({"filter": {"lang": {"not": "en"}}}, r"filter\.lang"),
        ({"filter": {"lang": [None]}}, r"filter\.lang"),
        ({"filter": 3}, r"filter: a mapping of attributes' names to values is expected \(got 3\)"),
        ({"filter": ["lang"]}, r"filter: a mapping"),
        ({"filter": {3: "en", "lang": "en"}}, r"filter: a mapping"),
        ({"exclude_item_ids": ["0"]}, r"exclude_item_ids: the catalogue's ids are integers \(got '0'\)"),
        ({"allow_item_ids": [True]}, r"allow_item_ids"),
    ],
)
def test_a_wrong_filter_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field):
        small().compile(**arguments)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"lang": np.str_("en")}, {"lang": "en"}),
        ({"in_stock": [np.True_]}, {"in_stock": True}),
        ({"year": np.int64(2)}, {"year": 2}),
        ({"year": np.float32(2)}, {"year": 2}),
    ],
    ids=repr,
)
def test_values_may_be_numpys(given: dict[str, Any], plain: dict[str, Any]) -> None:
    attributes = small().attributes
    assert attributes.parse(given) == attributes.parse(plain)


def test_ids_may_come_in_any_collection_but_text() -> None:
    index = EligibilityIndex(
        ItemCatalog.from_items([{"item_id": name, "sid": [i]} for i, name in enumerate("abc")])
    )
    expected = index.compile(exclude_item_ids=["a", "b"])
    assert expected is not None
    for ids in ({"a", "b"}, ("b", "a"), {"a": 1, "b": 2}.keys()):
        eligibility = index.compile(exclude_item_ids=ids)  # type: ignore[arg-type]
        assert eligibility is not None
        assert eligibility.excluded.tolist() == expected.excluded.tolist() == [0, 1]
    for wrong in ("ab", 5, (name for name in "ab"), np.array("a")):
        with pytest.raises(RequestError, match="exclude_item_ids: a list of item ids is expected"):
            index.compile(exclude_item_ids=wrong)  # type: ignore[arg-type]


def test_an_attribute_with_too_many_values_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes_module, "MAX_VALUES", 3)
    rows = [{"sid": [i], "metadata": {"url": f"u{i}", "lang": LANGUAGES[i % 3]}} for i in range(6)]
    index = AttributeIndex(build(rows))
    assert index.names == {"lang"}
    with pytest.raises(RequestError, match=r"filter\.url: has more than 3 values"):
        index.parse({"url": "u1"})
    assert index.matching(index.parse({"lang": "de"})).tolist() == [False, True, False] * 2


def test_string_ids_are_found_at_once() -> None:
    names = [f"item-{i}" for i in range(50)]
    catalog = ItemCatalog.from_items([{"item_id": name, "sid": [i % 7, i]} for i, name in enumerate(names)])
    asked = ["item-3", "item-", "", "item-49", "itém", "item-3"]
    assert catalog.find_many(asked).tolist() == [
        -1 if (found := catalog.find(name)) is None else found for name in asked
    ]
    assert catalog.find_many([]).tolist() == []
    assert catalog.find_many([5, "item-1"]).tolist() == [-1, catalog.find("item-1")]
    colliding = build([{"sid": [0], "metadata": None}])
    assert colliding.find_many([0, 2**70, -(2**63), 1]).tolist() == [0, -1, -1, -1]


def test_ids_may_be_numpys() -> None:
    """`np.str_` is a `str`, so it must not pass as a string that no item has."""

    class Film(str, enum.Enum):
        HEAT = "i3"

    strings = EligibilityIndex(ItemCatalog.from_items([{"item_id": f"i{n}", "sid": [n]} for n in range(9)]))
    numbers = EligibilityIndex(build([{"sid": [n], "metadata": None} for n in range(9)]))
    for ids in (np.array(["i3", "i4", "?"]), [np.str_("i3"), "i4", "?"], {"i3", "i4"}, [Film.HEAT, "i4"]):
        eligibility = strings.compile(exclude_item_ids=ids)  # type: ignore[arg-type]
        assert eligibility is not None
        assert eligibility.excluded.tolist() == [3, 4]
    for numbered in (np.array([3, 4, 99]), [np.int32(3), 4]):
        eligibility = numbers.compile(exclude_item_ids=numbered)  # type: ignore[arg-type]
        assert eligibility is not None
        assert eligibility.excluded.tolist() == [3, 4]
    for wrong in ([True], [3.0], ["3"], [np.bool_(True)], [None], np.array([3.0])):
        with pytest.raises(RequestError, match="exclude_item_ids: the catalogue's ids are integers"):
            numbers.compile(exclude_item_ids=wrong)  # type: ignore[arg-type]


def test_an_id_longer_than_any_of_the_catalogue_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = ItemCatalog.from_items([{"item_id": name, "sid": [n]} for n, name in enumerate(("a", "bé"))])
    hashed: list[int] = []
    hashes = StringColumn.hashes
    monkeypatch.setattr(StringColumn, "hashes", lambda self: hashed.append(len(self.data)) or hashes(self))
    assert catalog.find_many(["bé", "9" * 100_000, "éé", "a"]).tolist() == [1, -1, -1, 0]
    assert catalog.find_many(["x" * 100_000]).tolist() == [-1]
    assert hashed == [4]


def test_excluding_a_thousand_of_many_items_touches_little() -> None:
    """The work of a request goes by what it excludes: the arrays handed to the device say so."""
    rng = np.random.default_rng(0)
    sids = np.unique(rng.integers(0, 256, size=(300_000, 3)), axis=0)
    catalog = ItemCatalog.from_arrays(np.arange(len(sids)), sids)
    index = EligibilityIndex(catalog)
    compiled = index.compile(exclude_item_ids=rng.choice(len(sids), 1000, replace=False).tolist())
    assert compiled is not None
    assert len(compiled.places) <= 3000
    assert compiled.num_nodes[-1] == catalog.num_sids - 1000


@pytest.mark.parametrize("wrong", [[], "", 0, False, ("lang",)])
def test_a_filter_of_another_kind_is_not_no_filter(wrong: Any) -> None:
    index = EligibilityIndex(ItemCatalog.from_items([{"item_id": 1, "sid": [1]}]))
    with pytest.raises(RequestError, match="filter: a mapping of attributes' names to values is expected"):
        index.compile(filter=wrong)
    assert index.compile(filter={}) is None
