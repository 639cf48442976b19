"""The catalogue files that exist, read as they are; every complaint names the file and the place in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from onela.errors import CatalogError, ConfigError
from onela.items.builder import CatalogBuilder, add_record
from onela.items.columns import CatalogColumns
from onela.items.detect import detect_format, minionerec_files
from onela.items.json_text import json_lines, object_entries, read_text, text_lines
from onela.items.parquet import read_parquet
from onela.items.vocabulary import SidVocabulary

_RECORDS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class ReadOptions:
    """What a file does not say of itself.

    Attributes:
        vocabulary: needed where a file holds token ids; elsewhere it checks codes and depth.
        num_levels: depth of the SIDs; default: the vocabulary's, else what the file shows (3 for packed keys).
        radix: how many codes a packed key counts per level (`sid2pid.json`); default: the vocabulary's largest code
            plus one, if that is the same at every level.
        info: the `info.txt` with the titles that goes with a MiniOneRec `index.json`.
    """

    vocabulary: SidVocabulary | None = None
    num_levels: int | None = None
    radix: int | None = None
    info: Path | None = None


def read_catalog(path: Path, format: str, options: ReadOptions) -> CatalogColumns:
    """Read a catalogue file.

    Args:
        format: a key of `READERS`, or "auto" to go by the content.
    Raises:
        CatalogError: the file is malformed, or its format cannot be told. ConfigError: an option that does not apply.
    """
    if format == "auto":
        format = detect_format(path)
    if format not in READERS:
        raise ConfigError(f"format: {format!r}, expected one of auto, onela, {', '.join(READERS)}")
    if options.info is not None and format != "minionerec":
        raise ConfigError(f"info: goes with the format minionerec, {path} is {format}")
    if options.radix is not None and format != "openonerec":
        raise ConfigError(f"radix: goes with the format openonerec, {path} is {format}")
    if not path.exists():
        raise CatalogError("no such file or directory", path=str(path))
    builder = CatalogBuilder(options.vocabulary, str(path), options.num_levels)
    READERS[format](path, builder, options)
    return builder.finish()


def _read_jsonl(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    for line, record in json_lines(path):
        add_record(builder, record, line)


def _read_nvidia(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    """`item_id`, `token_ids`, `metadata`: the codes are found through the vocabulary."""
    vocabulary = _need_vocabulary(path, options)
    tables: list[dict[int, int]] = [
        dict(zip(vocabulary.token_ids(level).tolist(), vocabulary.codes(level).tolist()))
        for level in range(vocabulary.num_levels)
    ]
    for line, record in json_lines(path):
        if "token_ids" not in record:
            builder.fail("field 'token_ids' is missing", line)
        tokens = record.pop("token_ids")
        if "sid" in record:
            builder.fail("both 'sid' and 'token_ids' are there; keep one", line)
        if not isinstance(tokens, list) or len(tokens) != len(tables):
            builder.fail(f"token_ids: expected a list of {len(tables)} token ids, got {tokens!r}", line)
        record["sid"] = [_code_of(tables, level, token, builder, line) for level, token in enumerate(tokens)]
        add_record(builder, record, line)


def _code_of(tables: list[dict[int, int]], level: int, token: Any, builder: CatalogBuilder, line: int) -> int:
    code = tables[level].get(token) if type(token) is int else None
    if code is None:
        builder.fail(f"token_ids: {token!r} is no SID token of level {level}", line)
    return code


def _read_xllm(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    """Records of one int64 item id and one int32 token id per level, little endian, no header."""
    vocabulary = _need_vocabulary(path, options)
    record = np.dtype([("item_id", "<i8"), ("token_ids", "<i4", (vocabulary.num_levels,))])
    size = path.stat().st_size
    if size % record.itemsize:
        raise CatalogError(
            f"{size} bytes are no whole number of records of {record.itemsize} bytes (int64 item id, "
            f"{vocabulary.num_levels} int32 token ids); the last record is cut short",
            path=str(path),
            line=size // record.itemsize + 1,
        )
    with path.open("rb") as file:
        first = 1
        while len(block := np.fromfile(file, dtype=record, count=_RECORDS_AT_ONCE)):
            indices = vocabulary.encode_tokens(block["token_ids"], strict=False)
            unknown = np.argwhere(indices < 0)
            if len(unknown):
                row, level = unknown[0].tolist()
                token = int(block["token_ids"][row, level])
                builder.fail(f"token_ids: {token} is no SID token of level {level}", first + row)
            builder.add_block(block["item_id"].astype(np.int64), vocabulary.decode(indices), first_line=first)
            first += len(block)


def _read_openonerec(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    """`sid2pid.json`, `sid2iid.json`: packed SID to a list of items with their counts, which serve as weights."""
    num_levels = builder.num_levels or 3
    radix = _radix(path, options)
    for line, key, items in object_entries(read_text(path), path):
        if not (key.isascii() and key.isdecimal()) or len(key) > 60 or int(key) >= radix**num_levels:
            limit = f"an integer below {radix}**{num_levels}"
            builder.fail(f"key {key!r}: expected {limit}, the packed codes of a SID", line)
        rest, sid = int(key), [0] * num_levels
        for level in reversed(range(num_levels)):
            rest, sid[level] = divmod(rest, radix)
        if not isinstance(items, list) or not items:
            builder.fail(f"key {key!r}: expected a non-empty list of items, got {items!r}", line)
        for item in items:
            if not isinstance(item, dict) or ("pid" in item) == ("iid" in item):
                builder.fail(f"key {key!r}: expected objects with 'pid' or 'iid', got {item!r}", line)
            item_id = item.pop("pid") if "pid" in item else item.pop("iid")
            count = item.pop("count", None)
            builder.add(item_id, sid, None, item or None, count, line=line)


def _radix(path: Path, options: ReadOptions) -> int:
    vocabulary = options.vocabulary
    sizes = (
        set()
        if vocabulary is None
        else {int(vocabulary.codes(n)[-1]) + 1 for n in range(vocabulary.num_levels)}
    )
    if options.radix is None:
        if len(sizes) != 1:
            why = (
                "no vocabulary is given" if not sizes else f"the vocabulary's levels differ ({sorted(sizes)})"
            )
            raise CatalogError(
                f"the keys are packed codes, and how many codes a level counts is unknown: {why}; pass radix= "
                "(OpenOneRec packs with 8192)",
                path=str(path),
            )
        return sizes.pop()
    if options.radix < max(sizes, default=2):
        raise ConfigError(f"radix: {options.radix} is less than the {max(sizes, default=2)} codes of a level")
    return options.radix


def _read_minionerec(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    """`index.json` {item: [token of each level]}, and `info.txt` with the titles; or `info.txt` alone."""
    index, info = minionerec_files(path, options.info)
    titles = {} if info is None else _read_info(info)
    if index is None:
        assert info is not None  # minionerec_files gives at least one of them
        builder.source = str(info)
        for item_id, (sid, title, line) in titles.items():
            builder.add(item_id, sid, title, line=line)
        return
    builder.source = str(index)
    for line, item_id, sid in object_entries(read_text(index), index):
        if not isinstance(sid, list):
            builder.fail(f"item {item_id!r}: expected a list of SID tokens, got {sid!r}", line)
        told = titles.pop(item_id, None)
        builder.add(item_id, sid, None if told is None else told[1], line=line)
        if told is not None and told[0] != "".join(map(str, sid)):
            _refuse(
                info,
                told[2],
                f"item {item_id!r} has SID {told[0]}, but {''.join(map(str, sid))} in {index.name}",
            )
    if titles:
        item_id, (_, _, line) = next(iter(titles.items()))
        _refuse(info, line, f"item {item_id!r} is not in {index.name}, or stands there twice")


def _read_info(path: Path) -> dict[str, tuple[str, str, int]]:
    """Item id to (SID as written, title, line). A title may hold tabs of its own."""
    found: dict[str, tuple[str, str, int]] = {}
    for line, text in text_lines(path):
        fields = text.rstrip("\r\n").split("\t")
        if len(fields) < 3:
            _refuse(path, line, f"expected sid, title and item_id between tabs, got {len(fields)} fields")
        sid, title, item_id = fields[0].strip(), "\t".join(fields[1:-1]), fields[-1].strip()
        if item_id in found:
            _refuse(path, line, f"item_id {item_id!r} is there already, on line {found[item_id][2]}")
        found[item_id] = (sid, title, line)
    return found


def _read_parquet(path: Path, builder: CatalogBuilder, options: ReadOptions) -> None:
    read_parquet(path, builder)


def _need_vocabulary(path: Path, options: ReadOptions) -> SidVocabulary:
    if options.vocabulary is None:
        raise CatalogError("holds token ids; pass vocabulary= to read them as codes", path=str(path))
    return options.vocabulary


def _refuse(path: Path | None, line: int, message: str) -> NoReturn:
    raise CatalogError(message, path=str(path), line=line)


READERS: dict[str, Callable[[Path, CatalogBuilder, ReadOptions], None]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "openonerec": _read_openonerec,
    "minionerec": _read_minionerec,
    "nvidia": _read_nvidia,
    "xllm": _read_xllm,
}
