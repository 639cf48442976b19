"""What an item may look like, and what is said of one that may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onela.errors import CatalogError
from onela.items.builder import CatalogBuilder, CatalogItem, add_items
from onela.items.columns import StringColumn
from onela.items.sid_text import MAX_CODE
from onela.items.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary.from_vocab(
    {f"<{c}_{n}>": 10 * i + n for i, c in enumerate("abc") for n in (0, 2, 5)}
)


def build(*items: Any, vocabulary: SidVocabulary | None = None, num_levels: int | None = None) -> Any:
    builder = CatalogBuilder(vocabulary, "file", num_levels)
    add_items(builder, items)
    return builder.finish()


def test_fields_and_spellings() -> None:
    columns = build(
        CatalogItem("x", [0, 2, 5]),
        {"item_id": "y", "sid": "<a_2><b_2><c_0>", "title": "Y", "weight": 3},
        {"item_id": "z", "sid": ["<a_5>", "<b_0>", "<c_2>"], "metadata": {"k": [1, None]}, "title": None},
        CatalogItem("n", np.array([2, 2, 2])),  # type: ignore[arg-type]
        {"item_id": "t", "sid": (0, 0, 0), "metadata": "text", "weight": -0.5},
    )
    assert columns.sids.tolist() == [[0, 2, 5], [2, 2, 0], [5, 0, 2], [2, 2, 2], [0, 0, 0]]
    assert columns.sids.dtype == np.int32
    assert [columns.ids[row] for row in range(5)] == ["x", "y", "z", "n", "t"]
    assert [columns.titles[row] for row in range(5)] == [None, "Y", None, None, None]
    assert [columns.metadata[row] for row in range(5)] == [None, None, '{"k":[1,null]}', None, '"text"']
    assert columns.weights.tolist() == [0, 3, 0, 0, -0.5]
    assert columns.lines.tolist() == [1, 2, 3, 4, 5]


def test_absent_columns_are_none() -> None:
    columns = build(CatalogItem(np.int64(7), [1]))  # type: ignore[arg-type]
    assert columns.ids[0] == 7
    assert columns.titles is columns.metadata is columns.weights is None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"sid": [0, 2, 5]}, "field 'item_id' is missing"),
        ({"item_id": 2}, "field 'sid' is missing"),
        ({"item_id": 2, "sid": [0, 2, 5], "titel": "x"}, "unknown field 'titel'; known are item_id, sid"),
        ({"item_id": None, "sid": [0, 2, 5]}, "item_id: expected a string or an integer, got None"),
        ({"item_id": 1.5, "sid": [0, 2, 5]}, "item_id: expected a string or an integer, got 1.5"),
        ({"item_id": True, "sid": [0, 2, 5]}, "item_id: expected a string or an integer, got True"),
        ({"item_id": ["a"], "sid": [0, 2, 5]}, "item_id: expected a string or an integer"),
        ({"item_id": "b", "sid": [0, 2, 5]}, "item_id: 'b' is of type str, but line 1 has int"),
        ({"item_id": 2**63, "sid": [0, 2, 5]}, "item_id: 9223372036854775808 does not fit 64 bits"),
        ({"item_id": 2, "sid": [0, 2]}, "sid: 2 levels, expected 3"),
        ({"item_id": 2, "sid": [0, 2, 5, 0]}, "sid: 4 levels, expected 3"),
        ({"item_id": 2, "sid": []}, "sid: 0 levels, expected 3"),
        ({"item_id": 2, "sid": None}, "sid: expected a list of codes or a string of SID tokens, got None"),
        ({"item_id": 2, "sid": 7}, "sid: expected a list of codes"),
        ({"item_id": 2, "sid": {"a": 1}}, "sid: expected a list of codes"),
        ({"item_id": 2, "sid": [0, 2, 5.0]}, "sid: 5.0 is not an integer code"),
        ({"item_id": 2, "sid": [0, 2, True]}, "sid: True is not an integer code"),
        ({"item_id": 2, "sid": [0, 2, "<c_5>"]}, "sid: '<c_5>' is not an integer code"),
        ({"item_id": 2, "sid": [0, -1, 5]}, "sid: code -1 is out of range"),
        ({"item_id": 2, "sid": [0, MAX_CODE + 1, 5]}, "out of range"),
        ({"item_id": 2, "sid": "0-2-5"}, "sid: .*'0-2-5' is not a SID"),
        ({"item_id": 2, "sid": "<a_0><b_2>"}, "2 levels"),
        ({"item_id": 2, "sid": [0, 2, 5], "title": 5}, "title: expected a string, got 5"),
        ({"item_id": 2, "sid": [0, 2, 5], "title": "\ud800"}, "title: .* is not valid Unicode"),
        ({"item_id": 2, "sid": [0, 2, 5], "weight": "5"}, "weight: expected a finite number, got '5'"),
        ({"item_id": 2, "sid": [0, 2, 5], "weight": float("nan")}, "weight: expected a finite number"),
        ({"item_id": 2, "sid": [0, 2, 5], "weight": float("inf")}, "weight: expected a finite number"),
        ({"item_id": 2, "sid": [0, 2, 5], "weight": 10**400}, "weight: expected a finite number"),
        ({"item_id": 2, "sid": [0, 2, 5], "weight": True}, "weight: expected a finite number, got True"),
        ({"item_id": 2, "sid": [0, 2, 5], "metadata": {1, 2}}, "metadata: Object of type set"),
        ("not an item", "line 2: expected a CatalogItem or a mapping, got str"),
    ],
)
def test_what_is_refused_and_where(item: Any, message: str) -> None:
    for tail in ([], [CatalogItem(3, [0, 2, 5])]):
        with pytest.raises(CatalogError, match=message) as caught:
            build(CatalogItem(1, [0, 2, 5]), item, *tail)
        assert (caught.value.path, caught.value.line) == ("file", 2)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"item_id": 2, "sid": [0, 1, 5]}, "sid: code 1 of level 1 is out of range, not in the vocabulary"),
        ({"item_id": 2, "sid": [0, 2, 6]}, "sid: code 6 of level 2 is out of range"),
        ({"item_id": 2, "sid": "<a_0><b_2><c_6>"}, "'<c_6>' is not a SID token of the vocabulary"),
        ({"item_id": 2, "sid": [0, 2]}, "sid: 2 levels, expected 3"),
    ],
)
def test_against_a_vocabulary(item: Any, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        build(CatalogItem(1, [0, 2, 5]), item, vocabulary=VOCABULARY)
    assert caught.value.line == 2


def test_the_earlier_of_two_faults_is_named() -> None:
    """Codes are checked a block at a time, types at once: the block must not hide behind the later row."""
    with pytest.raises(CatalogError, match="code 1 of level 0") as caught:
        build(CatalogItem(1, [1, 2, 5]), {"item_id": 2}, vocabulary=VOCABULARY)
    assert caught.value.line == 1


def test_depth_is_that_of_the_first_item_or_as_told() -> None:
    assert build(CatalogItem(1, [3])).sids.shape == (1, 1)
    with pytest.raises(CatalogError, match="sid: 1 levels, expected 2") as caught:
        build(CatalogItem(1, [3]), num_levels=2)
    assert caught.value.line == 1
    with pytest.raises(CatalogError, match="num_levels: 2, but the vocabulary has 3 levels"):
        CatalogBuilder(VOCABULARY, None, 2)
    with pytest.raises(CatalogError, match="sid: 0 levels, expected at least 1"):
        build(CatalogItem(1, []))


def test_no_item() -> None:
    with pytest.raises(CatalogError, match="file: no item in it"):
        build()


def test_blocks_and_rows_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in small blocks, a column block between them, and fields that only some of them have."""
    monkeypatch.setattr("onela.items.builder._BLOCK_ROWS", 2)
    builder = CatalogBuilder(VOCABULARY)
    for row in range(3):
        builder.add(row, [0, 2, 5], line=row + 1)
    titles = StringColumn.from_strings([None, "t4"])
    builder.add_block(np.array([3, 4]), np.array([[2, 2, 2], [5, 5, 5]]), titles, first_line=4)
    builder.add_block(np.array([], dtype=np.int64), np.empty((0, 3), dtype=np.int64), first_line=6)
    builder.add(5, [0, 0, 0], metadata=[1], weight=2.5, line=9)
    columns = builder.finish()
    assert [columns.ids[row] for row in range(6)] == [0, 1, 2, 3, 4, 5]
    assert columns.sids.tolist() == [[0, 2, 5]] * 3 + [[2, 2, 2], [5, 5, 5], [0, 0, 0]]
    assert columns.titles is not None
    assert columns.metadata is not None
    assert columns.weights is not None
    assert columns.lines is not None
    assert [columns.titles[row] for row in range(6)] == [None, None, None, None, "t4", None]
    assert [columns.metadata[row] for row in range(6)] == [None] * 5 + ["[1]"]
    assert columns.weights.tolist() == [0, 0, 0, 0, 0, 2.5]
    assert columns.lines.tolist() == [1, 2, 3, 4, 5, 9]


def test_faults_in_a_block() -> None:
    def add(ids: Any, sids: list, weights: Any = None) -> None:
        CatalogBuilder(VOCABULARY, "file").add_block(ids, np.array(sids), weights=weights, first_line=10)

    ids = np.array([1, 2])
    for arguments, message, line in [
        ((ids, [[0, 0, 0], [0, 0, 1]]), "code 1 of level 2 is out of range", 11),
        ((ids, [[0, 0], [0, 0]]), "2 levels, expected 3", 10),
        ((ids, [[0, 0, 0], [2**40, 0, 0]]), f"code {2**40} of level 0", 11),
        (
            (ids, [[0, 0, 0], [0, 0, 0]], np.array([1, np.nan])),
            "weight: expected a finite number, got nan",
            11,
        ),
    ]:
        with pytest.raises(CatalogError, match=message) as caught:
            add(*arguments)
        assert caught.value.line == line
