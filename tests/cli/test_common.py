"""Reading lines of JSON for the subcommands."""

from __future__ import annotations

from pathlib import Path

import pytest

from onela import ConfigError
from onela.cli.common import read_lines


def test_a_string_may_hold_any_separator_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}\n'.encode())
    assert read_lines(file) == [
        (f"{file}, line 1", {"prompt": "a\u2028b\x85c"}),
        (f"{file}, line 3", {"prompt": "d"}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a"\n', "line 3: not JSON"),
        (b"[1]\n", "line 1: an object is expected, found list"),
        (b"\xff\n", "not readable"),
        (None, "not readable"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_lines(file)
    assert str(file) in str(caught.value)
