"""Streaming readers of JSON against `json.loads`, and the places they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onela.errors import CatalogError
from onela.items.json_text import json_lines, object_entries, read_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.sampled_from([None, 0, 2]), st.booleans())
def test_entries_are_those_of_json_loads(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert [(key, item) for _, key, item in object_entries(f" {text}\n", Path("f"))] == list(value.items())


def test_entries_have_lines() -> None:
    text = '{\n"a": 1,\n\n "b": [\n 2 ],"c": 3\n}'
    assert list(object_entries(text, Path("f"))) == [(2, "a", 1), (4, "b", [2]), (5, "c", 3)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("[1]", 1),
        ('\n"a"', 2),
        ("{", 1),
        ('{"a"', 1),
        ('{"a" 1}', 1),
        ('{\n"a": 1,\n}', 3),
        ('{\n"a": 1\n"b": 2}', 3),
        ('{\n"a": nope}', 2),
        ('{"a":\n\n[1, 2}', 3),
        ('{"a": 1}\n{"b": 2}', 2),
        ("{a: 1}", 1),
        ('{"a": ' + "[" * 100_000, 1),
        ('{"a": ' + "1" * 10_000 + "}", 1),
    ],
)
def test_not_an_object(text: str, line: int) -> None:
    with pytest.raises(CatalogError, match="not JSON") as caught:
        list(object_entries(text, Path("f")))
    assert caught.value.line == line


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": 2}')
    assert list(json_lines(path)) == [(1, {"a": 1}), (4, {"b": 2})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b"[1, 2]", "expected an object, got list"),
        (b"3", "expected an object, got int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not JSON"),
    ],
)
def test_faulty_lines(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(CatalogError, match=message) as caught:
        list(json_lines(path))
    assert (caught.value.path, caught.value.line) == (str(path), 3)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be read"):
        list(json_lines(tmp_path / "absent"))
    with pytest.raises(CatalogError, match="cannot be read"):
        read_text(tmp_path)
    (tmp_path / "f").write_bytes(b"ok\nok\n\xff")
    with pytest.raises(CatalogError, match="not UTF-8") as caught:
        read_text(tmp_path / "f")
    assert caught.value.line == 3
