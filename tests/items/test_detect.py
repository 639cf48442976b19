"""Formats are told by content, not by name; what could be two is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onela.errors import CatalogError
from onela.items import CatalogItem, ItemCatalog
from onela.items.detect import detect_format, minionerec_files


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.jsonl", b'{"item_id": 1, "sid": [1]}\n{}', "jsonl"),
        ("x", b'\xef\xbb\xbf\n {"item_id": 1, "sid": [1]}\n', "jsonl"),
        ("x.json", b'{"item_id": 1, "token_ids": [1]}\n', "nvidia"),
        ("x.jsonl", b'{"item_id": 1, "token_ids": [1]}\n', "nvidia"),
        ("x.jsonl", b'{"item_id": 1, "si', "jsonl"),
        ("x.ndjson", b"nonsense", "jsonl"),
        ("x.json", b'{"12": [{"pid": 1}]}', "openonerec"),
        ("x", b'{\n "12": [\n {"iid": 1, "count": 2}]}', "openonerec"),
        ("x.json", b'{"12": ["<a_1>", "<b_1>"]}', "minionerec"),
        ("x.json", b'{"B00\\u00e9": ["<a_1>"]', "minionerec"),
        ("x.txt", b"<a_1><b_2>\tTitle\t5\n", "minionerec"),
        ("x.parquet", b"PAR1...", "parquet"),
        ("x", b"PAR1...", "parquet"),
        ("x.bin", (5).to_bytes(8, "little") + b"\x01\0\0\0" * 3, "xllm"),
    ],
)
def test_by_content(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert detect_format(tmp_path / name) == expected


def test_a_large_one_line_object(tmp_path: Path) -> None:
    """The published files are one line of a hundred megabytes: only the head is looked at."""
    path = tmp_path / "sid2pid.json"
    path.write_text(json.dumps({str(n): [{"pid": n}] for n in range(100_000)}))
    assert path.stat().st_size > 1 << 20
    assert detect_format(path) == "openonerec"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl",
            b'{"item_id": 1, "sid": [1], "token_ids": [2]}',
            "could be jsonl or nvidia; pass format=",
        ),
        ("x.csv", b"item_id,sid\n1,2\n", "is in no known format; pass format="),
        ("x.json", b'{"a": {"b": 1}}', "is in no known format"),
        ("x.json", b'{"a": [{"b": 1}]}', "is in no known format"),
        ("x.json", b'{"a": [1, 2]}', "is in no known format"),
        ("x.json", b"{}", "is in no known format"),
        ("x.json", b"[1, 2]", "is in no known format"),
        ("x.json", b"{a", "not JSON"),
        ("x.parquet", b"item_id,sid\n", "not a parquet file"),
        ("x", b" \n\t", "no item in it"),
    ],
)
def test_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CatalogError, match=message):
        detect_format(tmp_path / name)


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such file or directory"):
        detect_format(tmp_path / "absent")
    with pytest.raises(CatalogError, match="is in no known format"):
        detect_format(tmp_path)
    (tmp_path / "Games.index.json").write_text("{}")
    assert detect_format(tmp_path) == "minionerec"
    saved = tmp_path / "saved"
    ItemCatalog.from_items([CatalogItem(1, (0,))]).save(saved)
    assert detect_format(saved) == "onela"
    (saved / "index.json").write_text("{}")
    with pytest.raises(CatalogError, match="could be onela or minionerec"):
        detect_format(saved)


def test_minionerec_files(tmp_path: Path) -> None:
    index, info = tmp_path / "Games.index.json", tmp_path / "Games.txt"
    index.touch()
    assert minionerec_files(tmp_path, None) == (index, None)
    info.touch()
    other = tmp_path / "elsewhere" / "info.txt"
    assert minionerec_files(tmp_path, None) == minionerec_files(index, info) == (index, info)
    assert minionerec_files(tmp_path, other) == (index, other)
    assert minionerec_files(info, None) == (None, info)
    (tmp_path / "Books.txt").touch()
    with pytest.raises(
        CatalogError, match=r"found Games\.index\.json, Books\.txt, Games\.txt; pass the file itself"
    ):
        minionerec_files(tmp_path, None)
    (tmp_path / "Books.index.json").touch()
    with pytest.raises(CatalogError, match=r"expected one \*index\.json"):
        minionerec_files(tmp_path, info)
