"""Reading JSON so that every complaint has a line: records one per line, and the entries of one large object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from onela.errors import CatalogError

_SPACE = re.compile(r"[ \t\n\r]*")
_BOM = b"\xef\xbb\xbf"


def read_text(path: Path) -> str:
    """A whole file as UTF-8.

    Raises:
        CatalogError: unreadable, or not UTF-8 (names the line).
    """
    raw = read_bytes(path).removeprefix(_BOM)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise CatalogError(f"not UTF-8: {error.reason}", path=str(path), line=line) from error


def read_bytes(path: Path, limit: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise CatalogError(f"cannot be read: {error.strerror or error}", path=str(path)) from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(1-based number, text) of every line that is not blank, without reading the file whole."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(_BOM) if number == 1 else raw
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise CatalogError(f"not UTF-8: {error.reason}", path=str(path), line=number) from error
                if not text.isspace():
                    yield number, text
    except OSError as error:
        raise CatalogError(f"cannot be read: {error.strerror or error}", path=str(path)) from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line of a JSONL file.

    Raises:
        CatalogError: a line that is not a JSON object.
    """
    for number, text in text_lines(path):
        try:
            record = json.loads(text.rstrip())  # or the error would stand on the line's end
        except (ValueError, RecursionError) as error:
            reason = (
                f"{error.msg} at column {error.colno}"
                if isinstance(error, json.JSONDecodeError)
                else str(error)
            )
            raise CatalogError(f"not JSON: {reason}", path=str(path), line=number) from error
        if not isinstance(record, dict):
            raise CatalogError(
                f"expected an object, got {type(record).__name__}", path=str(path), line=number
            )
        yield number, record


def object_entries(text: str, path: Path) -> Iterator[tuple[int, str, Any]]:
    """(line, key, value) of the entries of one JSON object, decoded one at a time.

    The published files hold millions of entries; decoded all at once they would take many times their size.

    Raises:
        CatalogError: not a JSON object.
    """
    decoder = json.JSONDecoder()
    line, counted = 1, 0

    def fail(message: str, position: int) -> NoReturn:
        raise CatalogError(f"not JSON: {message}", path=str(path), line=text.count("\n", 0, position) + 1)

    def skip(position: int) -> int:
        match = _SPACE.match(text, position)
        assert match is not None  # the pattern matches the empty string
        return match.end()

    def decode(position: int) -> tuple[Any, int]:
        try:
            return decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            fail(error.msg, error.pos)
        except (ValueError, RecursionError) as error:  # too many digits, too deep
            fail(str(error), position)

    position = skip(0)
    if text[position : position + 1] != "{":
        fail("expected an object", position)
    position = skip(position + 1)
    more = text[position : position + 1] != "}"
    while more:
        start = position
        if text[position : position + 1] != '"':
            fail("expected a key in quotes", position)
        key, position = decode(position)
        position = skip(position)
        if text[position : position + 1] != ":":
            fail("expected ':' after a key", position)
        value, position = decode(skip(position + 1))
        line, counted = line + text.count("\n", counted, start), start
        yield line, key, value
        position = skip(position)
        mark = text[position : position + 1]
        if mark not in (",", "}"):
            fail("expected ',' or '}' after a value", position)
        more = mark == ","
        position = skip(position + 1) if more else position
    if skip(position + 1) != len(text):
        fail("something follows the object", skip(position + 1))
