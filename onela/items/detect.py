"""Which of the known catalogue formats a file is, by its content; a file that could be two is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onela.errors import CatalogError
from onela.items import storage
from onela.items.json_text import object_entries, read_bytes

_HEAD_BYTES = 1 << 20
_BOM = "\ufeff"


def detect_format(path: Path) -> str:
    """The format's name, as `readers.READERS` has it; "onela" for a directory that `ItemCatalog.save` wrote.

    Raises:
        CatalogError: nothing there, an empty file, an unknown format, or more than one that fits.
    """
    if path.is_dir():
        found = ["onela"] if storage.is_saved(path) else []
        if any(path.glob("*index.json")):
            found.append("minionerec")
        return _only(path, found)
    if not path.exists():
        raise CatalogError("no such file or directory", path=str(path))
    head = read_bytes(path, _HEAD_BYTES)
    if not head.strip():
        raise CatalogError("no item in it", path=str(path))
    if head.startswith(b"PAR1"):
        return "parquet"
    if path.suffix == ".parquet":
        raise CatalogError("not a parquet file", path=str(path))
    if b"\0" in head:  # no text file has NUL bytes; small integers in binary always do
        return "xllm"
    text = head.decode(errors="replace").removeprefix(_BOM)
    first_line = text.lstrip().split("\n", 1)[0]
    record = _parsed(first_line)
    if path.suffix in (".jsonl", ".ndjson") or (isinstance(record, dict) and "item_id" in record):
        return _json_lines_format(path, record)
    if first_line.startswith("{"):
        return _json_object_format(path, text)
    if first_line.startswith("<") and first_line.count("\t") >= 2:
        return "minionerec"
    return _only(path, [])


def _json_lines_format(path: Path, record: Any) -> str:
    # A first line that cannot be parsed is for the reader to complain of.
    fields = record if isinstance(record, dict) else {}
    found = [name for name, field in (("jsonl", "sid"), ("nvidia", "token_ids")) if field in fields]
    return _only(path, found or ["jsonl"])


def _json_object_format(path: Path, text: str) -> str:
    """By the first entry, which is all of the object that need be looked at."""
    entries = object_entries(text, path)
    _, _, value = next(entries, (0, "", None))
    inner = value[0] if isinstance(value, list) and value else None
    if isinstance(inner, dict):
        return _only(path, ["openonerec"] if "pid" in inner or "iid" in inner else [])
    return _only(path, ["minionerec"] if isinstance(inner, str) else [])


def minionerec_files(path: Path, info: Path | None) -> tuple[Path | None, Path | None]:
    """(`index.json`, `info.txt`) of a MiniOneRec catalogue: a directory with both, or one of them.

    Raises:
        CatalogError: a directory in which the files cannot be told.
    """
    if path.is_dir():
        indices = sorted(path.glob("*index.json"))
        infos = [info] if info is not None else sorted(path.glob("*.txt"))
        if len(indices) != 1 or len(infos) > 1:
            names = ", ".join(file.name for file in [*indices, *infos]) or "none"
            raise CatalogError(
                f"expected one *index.json and at most one *.txt, found {names}; pass the file itself, and info=",
                path=str(path),
            )
        return indices[0], (infos[0] if infos else None)
    if path.suffix == ".txt":
        return None, path
    return path, info


def _only(path: Path, found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    what = f"could be {' or '.join(found)}" if found else "is in no known format"
    raise CatalogError(f"{what}; pass format= to say which", path=str(path))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
