"""A catalogue written and read again is the same catalogue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onela.errors import CatalogError
from onela.items import CatalogItem, ItemCatalog, SidVocabulary, convert_catalog

ITEMS = [
    CatalogItem("x", (1, 2), "Gr\u00fc\u00dfe\n", {"k": [1, None]}, 2.0),
    CatalogItem("y", (1, 2), None, None, 3.5),
    CatalogItem("z", (0, 5), "", "text", 0.0),
]


@pytest.mark.parametrize(
    "items", [ITEMS, [CatalogItem(5, (7,)), CatalogItem(-(2**63), (0,))]], ids=["rich", "bare"]
)
def test_round_trips(tmp_path: Path, items: list[CatalogItem]) -> None:
    ItemCatalog.from_items(items).save(tmp_path / "start")
    source = tmp_path / "start"
    version = ItemCatalog.load(source).version
    for name in ("a.jsonl", "b.parquet", "c", "deep/d.jsonl", "deep/e"):
        written = convert_catalog(source, tmp_path / name)
        source = tmp_path / name
        loaded = ItemCatalog.load(source)
        assert written.version == loaded.version == version
        assert list(loaded.records()) == list(written.records())
    assert {path.name for path in tmp_path.iterdir()} == {"start", "a.jsonl", "b.parquet", "c", "deep"}


def test_parquet_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onela.items.parquet._ROWS_AT_ONCE", 3)
    catalog = ItemCatalog.from_arrays(range(10), [[n] for n in range(10)])
    catalog.save(tmp_path / "start")
    convert_catalog(tmp_path / "start", tmp_path / "x.parquet")
    assert ItemCatalog.load(tmp_path / "x.parquet").version == catalog.version


def test_options_reach_the_reader(tmp_path: Path) -> None:
    """Packed keys and holes: what is written are published codes, whatever the catalogue was bound to."""
    vocabulary = SidVocabulary.from_vocab(
        {f"<{c}_{n}>": 10 * i + n for i, c in enumerate("ab") for n in (0, 3, 8)}
    )
    source = tmp_path / "sid2pid.json"
    source.write_text(json.dumps({"83": [{"pid": 1, "count": 2}, {"pid": 2, "count": 5}], "0": [{"pid": 1}]}))
    convert_catalog(source, tmp_path / "x.jsonl", vocabulary, radix=10, duplicates="best")
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert lines == [
        {"item_id": 2, "sid": [8, 3], "weight": 5.0},
        {"item_id": 1, "sid": [8, 3], "weight": 2.0},
    ]


def test_a_failure_leaves_the_target(tmp_path: Path) -> None:
    source, target = tmp_path / "bad.jsonl", tmp_path / "x.jsonl"
    source.write_text('{"item_id": 1}')
    target.write_text("old")
    with pytest.raises(CatalogError, match="line 1: field 'sid' is missing"):
        convert_catalog(source, target)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "x.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a"])
def test_a_target_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    ItemCatalog.from_items(ITEMS).save(tmp_path / "start")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CatalogError, match=f"file/{name}: cannot be written: "):
        convert_catalog(tmp_path / "start", tmp_path / "file" / name)
