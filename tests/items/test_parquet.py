"""Parquet written by pyarrow itself, in the types that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onela.errors import CatalogError, UnavailableError
from onela.items import ItemCatalog, SidVocabulary

SIDS = [[3, 1], [0, 2], [3, 1]]


def write(path: Path, **columns: Any) -> Path:
    table = pa.table(
        {
            name: column if isinstance(column, pa.Array) else pa.array(column)
            for name, column in columns.items()
        }
    )
    pq.write_table(table, path)
    return path


def listing(catalog: ItemCatalog) -> list[tuple[Any, ...]]:
    return [(r.item_id, tuple(r.sid), r.title, r.metadata, r.weight) for r in catalog.records()]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([7, 8, 9], pa.int64()), [8, 7, 9]),
        (pa.array([7, 8, 9], pa.uint64()), [8, 7, 9]),
        (pa.array([7, 8, 9], pa.int16()), [8, 7, 9]),
        (pa.array(["x", "y", "z"]), ["y", "x", "z"]),
        (pa.array(["x", "y", "z"], pa.large_string()), ["y", "x", "z"]),
        (pa.array(["x", "y", "z"]).dictionary_encode(), ["y", "x", "z"]),
    ],
)
@pytest.mark.parametrize(
    "sids",
    [
        pa.array(SIDS, pa.list_(pa.int64())),
        pa.array(SIDS, pa.list_(pa.uint16())),
        pa.array(SIDS, pa.large_list(pa.int32())),
        pa.array(SIDS, pa.list_(pa.int32(), 2)),
        pa.array([f"<a_{a}><b_{b}>" for a, b in SIDS]),
        pa.array([[f"<a_{a}>", f"<b_{b}>"] for a, b in SIDS]),
    ],
    ids=["list", "unsigned", "large list", "fixed list", "text", "tokens"],
)
def test_types(tmp_path: Path, ids: pa.Array, expected: list, sids: pa.Array) -> None:
    catalog = ItemCatalog.load(write(tmp_path / "x.parquet", item_id=ids, sid=sids))
    assert [(row[0], row[1]) for row in listing(catalog)] == list(zip(expected, [(0, 2), (3, 1), (3, 1)]))


@pytest.mark.parametrize("name", ["item_id", "pid", "iid"])
@pytest.mark.parametrize("weight", ["weight", "count"])
def test_names_and_optional_columns(tmp_path: Path, name: str, weight: str) -> None:
    path = write(
        tmp_path / "x.parquet",
        sid=SIDS,
        title=["T", None, "U"],
        metadata=[{"k": 1}, None, {"k": None}],
        unrelated=[1.0, 2.0, 3.0],
        **{name: [7, 8, 9], weight: [1, None, 5]},
    )
    assert listing(ItemCatalog.load(path)) == [
        (8, (0, 2), None, None, 0.0),
        (9, (3, 1), "U", {"k": None}, 5.0),
        (7, (3, 1), "T", {"k": 1}, 1.0),
    ]


def test_metadata_as_json_text(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", pid=[1, 2], sid=[[0], [1]], metadata=['{"a": [1]}', None])
    assert [row[3] for row in listing(ItemCatalog.load(path))] == [{"a": [1]}, None]


def test_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several row groups and batches keep their place, in results and in errors."""
    monkeypatch.setattr("onela.items.parquet._ROWS_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    sids, ids = rng.integers(0, 5, (100, 3)), rng.permutation(100)
    for texts in (False, True):
        column = pa.array([f"i{i}" for i in ids]) if texts else pa.array(ids)
        table = pa.table({"item_id": column, "sid": pa.array(sids.tolist())})
        pq.write_table(table, tmp_path / "x.parquet", row_group_size=30)
        expected = ItemCatalog.from_arrays(column.to_pylist(), sids)
        assert ItemCatalog.load(tmp_path / "x.parquet").version == expected.version
    rows = sids.tolist()
    rows[52] = [0, 0]
    write(tmp_path / "y.parquet", item_id=ids, sid=rows)
    with pytest.raises(CatalogError, match="sid: 2 levels, expected 3") as caught:
        ItemCatalog.load(tmp_path / "y.parquet")
    assert caught.value.line == 53


@pytest.mark.parametrize(
    ("columns", "message", "line"),
    [
        ({"sid": SIDS}, "no column 'item_id' or 'pid' or 'iid'; there are sid", None),
        ({"item_id": [1, 2, 3]}, "no column 'sid'", None),
        (
            {"item_id": [1, 2, 3], "pid": [1, 2, 3], "sid": SIDS},
            "'item_id' and 'pid' both name the item_id",
            None,
        ),
        ({"item_id": [1, None, 3], "sid": SIDS}, "item_id: is null", 2),
        ({"item_id": [1, 2, 3], "sid": [[1, 2], [1, 2], None]}, "sid: is null", 3),
        ({"item_id": [1, 2, 3], "sid": [[1, 2], [1, None], [1, 2]]}, "sid: holds a null", 2),
        ({"item_id": [1, 2, 3], "sid": [[1, 2], [1, 2], [1]]}, "sid: 1 levels, expected 2", 3),
        ({"item_id": [1, 2, 3], "sid": pa.array([[]] * 3, pa.list_(pa.int64()))}, "sid: 0 levels", 1),
        ({"item_id": [1, 2, 3], "sid": [[1, 2], [-1, 2], [1, 2]]}, "code -1 of level 0 is out of range", 2),
        ({"item_id": [1, 2, 3], "sid": [1, 2, 3]}, "sid: column of type int64", 1),
        ({"item_id": [1, 2, 3], "sid": [[1.0], [2.0], [3.0]]}, "sid: 1.0 is not an integer code", 1),
        ({"item_id": [1, 2, 3], "sid": ["<a_1>", "a", "<a_1>"]}, "sid: 'a' is not a SID", 2),
        ({"item_id": [1.0, 2.0, 3.0], "sid": SIDS}, "item_id: column of type double", 1),
        ({"item_id": pa.array([1, 2**63, 3], pa.uint64()), "sid": SIDS}, "does not fit 64 bits", 2),
        ({"item_id": [1, 2, 1], "sid": SIDS}, "item_id 1 is there already, on line 1", 3),
        ({"item_id": [1, 2, 3], "sid": SIDS, "title": [1, 2, 3]}, "title: column of type int64", 1),
        ({"item_id": [1, 2, 3], "sid": SIDS, "weight": ["a", "b", "c"]}, "weight: column of type string", 1),
        (
            {"item_id": [1, 2, 3], "sid": SIDS, "weight": [1.0, np.inf, 2.0]},
            "weight: expected a finite number",
            2,
        ),
        ({"item_id": [1, 2, 3], "sid": SIDS, "metadata": ["1", "{", "2"]}, "metadata: not JSON text", 2),
        (
            {"item_id": [1, 2, 3], "sid": SIDS, "metadata": ["1", "2", "[" * 99_999]},
            "metadata: not JSON text",
            3,
        ),
        ({"item_id": [1, 2, 3], "sid": SIDS, "metadata": ["1", r'"\ud800"', "2"]}, "is not valid Unicode", 2),
        ({"item_id": [1, 2, 3], "sid": SIDS, "metadata": [b"x", b"y", b"z"]}, "metadata: no JSON value", 1),
        ({"item_id": [], "sid": pa.array([], pa.list_(pa.int64()))}, "no item in it", None),
    ],
)
def test_faults(tmp_path: Path, columns: dict, message: str, line: int | None) -> None:
    path = write(tmp_path / "x.parquet", **columns)
    with pytest.raises(CatalogError, match=message) as caught:
        ItemCatalog.load(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)


def test_codes_are_held_against_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", pid=[1, 2, 3], sid=SIDS)
    vocabulary = SidVocabulary.from_token_ids([[5, 6, 7, 8], [1, 2]])
    with pytest.raises(
        CatalogError, match="code 2 of level 1 is out of range, not in the vocabulary"
    ) as caught:
        ItemCatalog.load(path, vocabulary)
    assert caught.value.line == 2


def test_broken_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", pid=list(range(1000)), sid=[[n] for n in range(1000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CatalogError, match="not a parquet file"):
        ItemCatalog.load(path)
    path.write_bytes(whole[:4] + bytes(1000) + whole[1004:])
    with pytest.raises(CatalogError, match=r"x\.parquet.*(cannot be read|not a parquet file)"):
        ItemCatalog.load(path)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", pid=[1], sid=[[1]])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UnavailableError, match="pip install pyarrow"):
        ItemCatalog.load(path)
