"""A catalogue on disk: a directory of plain `.npy` files that are memory-mapped, and a JSON header."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onela.errors import CatalogError
from onela.items.assembly import Assembled
from onela.items.columns import CatalogColumns, IdColumn, StringColumn
from onela.items.trie import ItemTrie, load_array, read_header

FORMAT_VERSION = 1
HEADER = "catalog.json"
_FIELDS = ("num_items", "version", "id_kind", "texts", "has_weights")


def is_saved(path: Path) -> bool:
    """Whether a directory holds a catalogue that `save` wrote."""
    return (path / HEADER).is_file()


def save(parts: Assembled, path: str | os.PathLike[str]) -> None:
    """Write a catalogue; one that is there already is replaced by a rename, never written into.

    A server may have the old files mapped: cutting them short would kill it, and moving them away does not.

    Raises:
        CatalogError: something else is there, or it cannot be written.
    """
    target = Path(path)
    with writing(target):
        _save(parts, target)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Inside, what the system refuses is a `CatalogError` that names the file or directory to be written."""
    try:
        yield
    except OSError as error:
        raise CatalogError(f"cannot be written: {error.strerror or error}", path=str(target)) from error


def _save(parts: Assembled, target: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not is_saved(target)):
        raise CatalogError("is there already and is no catalogue; nothing was written", path=str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new = staging / "new"
        new.mkdir()
        _write(parts, new)
        old = target.rename(staging / "old") if target.is_dir() else None
        try:
            new.rename(target)
        except OSError:
            if old is not None:
                old.rename(target)
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(parts: Assembled, folder: Path) -> None:
    columns = parts.columns
    texts: dict[str, Any] = {}
    for name, column in (
        ("ids", columns.ids.values),
        ("titles", columns.titles),
        ("metadata", columns.metadata),
    ):
        if isinstance(column, StringColumn):
            column.save(folder, name)
            texts[name] = {"num_bytes": len(column.data), "nullable": column.valid is not None}
    if isinstance(columns.ids.values, np.ndarray):
        np.save(folder / "ids.npy", columns.ids.values)
    if columns.weights is not None:
        np.save(folder / "weights.npy", columns.weights)
    np.save(folder / "item_offsets.npy", parts.item_offsets)
    np.save(folder / "id_keys.npy", parts.id_keys)
    np.save(folder / "id_rows.npy", parts.id_rows)
    parts.trie.save(folder)
    header = {
        "format": FORMAT_VERSION,
        "version": parts.version,
        "num_items": len(columns.ids),
        "id_kind": columns.ids.kind,
        "texts": texts,
        "has_weights": columns.weights is not None,
    }
    (folder / HEADER).write_text(json.dumps(header))


def load(path: str | os.PathLike[str]) -> Assembled:
    """Memory-map a catalogue. What the arrays hold is not looked at; `check` does that.

    Raises:
        CatalogError: no catalogue there, another format version, or files that do not fit the header.
    """
    folder = Path(path)
    try:
        return _load(folder)
    # An entry that is no list, or a missing one.
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise CatalogError(f"a header is damaged: {error!r}", path=str(folder)) from error


def check(parts: Assembled) -> None:
    """Refuse arrays that lead to places that are not there. Reads all: a sixth of a second for ten million items.

    Raises:
        CatalogError: names the array.
    """
    trie, columns, where = parts.trie, parts.columns, parts.columns.source

    def must(holds: bool, name: str) -> None:
        if not holds:
            raise CatalogError(f"{name} is damaged; save the catalogue again", path=where)

    for level, (offsets, codes) in enumerate(zip(trie.offsets, trie.codes)):
        name = f"trie_offsets_{level}.npy"
        counts = np.diff(offsets)
        must(int(offsets[0]) == 0 and int(counts.min()) > 0, name)
        must(int(counts.max()) == trie.max_children[level], "trie.json")
        ascending = np.diff(codes) > 0
        ascending[offsets[1:-1] - 1] = True
        inside = int(codes.min()) >= 0 and int(codes.max()) < trie.codebook_sizes[level]
        must(inside and bool(ascending.all()), f"trie_codes_{level}.npy")
    must(int(parts.item_offsets[0]) == 0 and int(np.diff(parts.item_offsets).min()) > 0, "item_offsets.npy")
    rows = parts.id_rows
    must(int(rows.min()) >= 0 and int(rows.max()) < len(columns.ids), "id_rows.npy")
    must(bool((parts.id_keys[1:] >= parts.id_keys[:-1]).all()), "id_keys.npy")
    for name, column in (
        ("ids", columns.ids.values),
        ("titles", columns.titles),
        ("metadata", columns.metadata),
    ):
        if isinstance(column, StringColumn):
            lengths = np.diff(column.offsets)
            must(int(column.offsets[0]) == 0 and int(lengths.min()) >= 0, f"{name}_offsets.npy")


def _load(folder: Path) -> Assembled:
    header = read_header(folder / HEADER, _FIELDS, FORMAT_VERSION)
    num_items, texts = header["num_items"], header["texts"]
    if not isinstance(header["version"], str):
        raise CatalogError(f"field 'version' is no text: {header['version']!r}", path=str(folder / HEADER))
    trie = ItemTrie.load(folder)

    def text(name: str) -> StringColumn | None:
        if name not in texts:
            return None
        return StringColumn.load(folder, name, num_items, texts[name]["num_bytes"], texts[name]["nullable"])

    if header["id_kind"] == "str":
        ids = text("ids")
        if ids is None:
            raise CatalogError("field 'texts' lacks the item ids", path=str(folder / HEADER))
        id_column = IdColumn(ids)
    else:
        id_column = IdColumn(load_array(folder / "ids.npy", (num_items,), "i"))
    item_offsets = load_array(folder / "item_offsets.npy", (trie.num_sids + 1,), "i")
    if int(item_offsets[-1]) != num_items:
        raise CatalogError("item_offsets do not span the items", path=str(folder))
    columns = CatalogColumns(
        id_column,
        np.empty((0, trie.num_levels), dtype=np.int32),
        text("titles"),
        text("metadata"),
        load_array(folder / "weights.npy", (num_items,), "f") if header["has_weights"] else None,
        None,
        str(folder),
    )
    id_keys = load_array(folder / "id_keys.npy", (num_items,), "iu")
    id_rows = load_array(folder / "id_rows.npy", (num_items,), "i")
    return Assembled(columns, item_offsets, id_keys, id_rows, trie, header["version"])
