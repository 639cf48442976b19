"""A catalogue on disk: a directory of plain `.npy` files that are memory-mapped, and a JSON header."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
    """
    target = Path(path)
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
    """Memory-map a catalogue.

    Raises:
        CatalogError: no catalogue there, another format version, or files that do not fit the header.
    """
    folder = Path(path)
    header = read_header(folder / HEADER, _FIELDS, FORMAT_VERSION)
    num_items, texts = header["num_items"], header["texts"]
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
