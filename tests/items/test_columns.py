"""String and id columns against plain Python lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onela.errors import CatalogError
from onela.items.columns import CatalogColumns, IdColumn, StringColumn, hash_string, id_column

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
# Few letters, NUL among them, so that prefixes meet and zero padding could be mistaken for text.
CLOSE_TEXT = st.text(st.sampled_from("a\0b\u00e9\U0001f600"), max_size=20)


def listed(column: StringColumn) -> list[str | None]:
    return [column[row] for row in range(len(column))]


@given(st.lists(st.none() | TEXT), st.data())
def test_round_trip_take_and_concatenate(texts: list[str | None], data: st.DataObject) -> None:
    column = StringColumn.from_strings(texts)
    assert column.tolist() == texts
    assert listed(column) == texts
    assert (column.valid is None) == (None not in texts)
    if texts:
        rows = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1))), dtype=np.int64)
        assert listed(column.take(rows)) == [texts[row] for row in rows]
    more = data.draw(st.lists(st.none() | TEXT))
    joined = StringColumn.concatenate([column, StringColumn.from_strings(more), column])
    assert listed(joined) == texts + more + texts


def test_take_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onela.items.columns._TAKE_ROWS", 3)
    texts = [str(n) * (n % 4) for n in range(20)]
    rows = np.random.default_rng(0).permutation(20)
    assert listed(StringColumn.from_strings(texts).take(rows)) == [texts[row] for row in rows]


@given(st.lists(CLOSE_TEXT, min_size=1))
def test_hashes(texts: list[str]) -> None:
    hashes = StringColumn.from_strings(texts).hashes()
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [hash_string(text) for text in texts]


def test_hash_is_fnv1a() -> None:
    assert [hash_string(text) for text in ("", "a", "foobar")] == [
        0xCBF29CE484222325,
        0xAF63DC4C8601EC8C,
        0x85944171F73967E8,
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), CLOSE_TEXT | TEXT), unique_by=lambda pair: pair[1], min_size=1),
    st.data(),
)
def test_sort_within_groups(pairs: list[tuple[int, str]], data: st.DataObject) -> None:
    column = StringColumn.from_strings([text for _, text in pairs])
    rows = sorted(data.draw(st.permutations(range(len(pairs)))), key=lambda row: pairs[row][0])
    groups = np.array([pairs[row][0] for row in rows])
    expected = sorted(rows, key=lambda row: (pairs[row][0], pairs[row][1]))
    assert column.sort_within(np.array(rows), groups).tolist() == expected


@given(st.lists(st.none() | TEXT))
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, texts: list[str | None]) -> None:
    folder = tmp_path_factory.mktemp("column")
    column = StringColumn.from_strings(texts)
    column.save(folder, "x")
    loaded = StringColumn.load(folder, "x", len(texts), len(column.data), column.valid is not None)
    assert listed(loaded) == texts


def test_damaged_text_is_refused(tmp_path: Path) -> None:
    StringColumn.from_strings(["ab", "c"]).save(tmp_path, "x")
    with pytest.raises(CatalogError, match=r"x_data\.npy: holds uint8 \[3\], the header says \[4\]"):
        StringColumn.load(tmp_path, "x", 2, 4, False)
    np.save(tmp_path / "x_offsets.npy", np.array([0, 1, 2]))
    with pytest.raises(CatalogError, match="offsets of x do not span its text"):
        StringColumn.load(tmp_path, "x", 2, 3, False)


@pytest.mark.parametrize("values", [[3, -1, 2**62], ["b", "a", ""]])
def test_id_column(values: list) -> None:
    column = IdColumn(id_column(values))
    assert column.kind == type(values[0]).__name__
    assert [column[row] for row in range(3)] == values
    assert all(type(column[row]) is type(values[0]) for row in range(3))
    assert [column.key_of(value) for value in values] == column.keys().tolist()
    assert column.key_of(3.0) is column.key_of(None) is column.key_of(True) is None
    both = IdColumn.concatenate([column, column.take(np.array([2, 0]))])
    assert [both[row] for row in range(5)] == [*values, values[2], values[0]]


@pytest.mark.parametrize(
    ("given_ids", "expected"),
    [
        (np.array([1, 2], dtype=np.uint8), [1, 2]),
        (np.array([1, 2], dtype=np.uint64), [1, 2]),
        (np.array(["x", "yy"]), ["x", "yy"]),
        (np.array(["x", "yy"], dtype=object), ["x", "yy"]),
        (("x", "yy"), ["x", "yy"]),
        (range(2), [0, 1]),
        ([], []),
    ],
)
def test_id_column_from_anything(given_ids: object, expected: list) -> None:
    column = IdColumn(id_column(given_ids))
    assert [column[row] for row in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("values", "message", "line"),
    [
        ([1, "a"], "got 'a'", 2),
        (["a", None], "got None", 2),
        ([1, 2.0], "got 2.0", 2),
        ([1.0], "got 1.0", 1),
        ([1, True], "got True", 2),
        ([1, 2**63], "does not fit 64 bits", 2),
        (np.array([0, 2**63], dtype=np.uint64), "does not fit 64 bits", 2),
        (np.array([1.5]), "got 1.5", 1),
    ],
)
def test_wrong_ids(values: object, message: str, line: int) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        id_column(values)
    assert caught.value.line == line


def test_rows_of_a_catalogue_move_together() -> None:
    columns = CatalogColumns(
        IdColumn(id_column(["a", "b", "c"])),
        np.array([[1], [2], [3]], dtype=np.int32),
        StringColumn.from_strings(["A", None, "C"]),
        None,
        np.array([1.0, 2.0, 3.0]),
        np.array([4, 5, 7]),
        "file",
    )
    moved = columns.take(np.array([2, 1]))
    assert [moved.ids[0], moved.ids[1]] == ["c", "b"]
    assert moved.sids.tolist() == [[3], [2]]
    assert moved.titles is not None
    assert listed(moved.titles) == ["C", None]
    assert moved.metadata is None
    assert moved.weights is not None
    assert moved.weights.tolist() == [3.0, 2.0]
    assert (moved.line(0), moved.line(1), moved.source) == (7, 5, "file")
    assert CatalogColumns(columns.ids, columns.sids).line(2) == 3
