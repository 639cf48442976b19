"""From rows in file order to the arrays of a catalogue: duplicates, order, trie, version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onela.errors import CatalogError, ConfigError
from onela.items.columns import CatalogColumns, IdColumn, StringColumn
from onela.items.lookup import SortedKeys
from onela.items.trie import ItemTrie, pack_sids, sorted_order

DUPLICATES = ("error", "best")


@dataclass(frozen=True, eq=False)
class Assembled:
    """A catalogue's arrays; items lie in the order of (SID, weight descending, id).

    Attributes:
        columns: ids, titles, metadata and weights in storage order; `sids` is empty, the trie has them.
        item_offsets: [num_sids + 1]; the items of SID s are rows item_offsets[s] : item_offsets[s + 1].
        id_keys, id_rows: keys of all ids ascending, and the row that each belongs to.
        trie: over published codes.
        version: hash of the content; independent of the order of rows in the file.
    """

    columns: CatalogColumns
    item_offsets: np.ndarray
    id_keys: np.ndarray
    id_rows: np.ndarray
    trie: ItemTrie
    version: str

    @cached_property
    def id_lookup(self) -> SortedKeys:
        """Finds keys among `id_keys`; made when it is first asked for."""
        return SortedKeys(self.id_keys)

    @cached_property
    def longest_id(self) -> int:
        """Bytes of the longest id, 0 for integers."""
        return self.columns.ids.longest


def assemble(columns: CatalogColumns, duplicates: str = "error") -> Assembled:
    """Sort a catalogue.

    Args:
        duplicates: what to do with an item that stands in several rows: "error", or "best", which keeps
            the row with the largest weight (the first of equals).
    Raises:
        CatalogError: a duplicate item (names both lines).
        ConfigError: unknown `duplicates`.
    """
    if duplicates not in DUPLICATES:
        raise ConfigError(f"duplicates: {duplicates!r}, expected one of {', '.join(DUPLICATES)}")
    id_keys = columns.ids.keys()
    id_order = np.argsort(id_keys)
    id_keys = id_keys[id_order]
    groups = _duplicate_groups(columns.ids, id_keys, id_order)
    if groups:
        if duplicates == "error":
            first, second = min((group[:2] for group in groups), key=lambda pair: pair[1])
            raise CatalogError(
                f"item_id {columns.ids[first]!r} is there already, on line {columns.line(first)}",
                path=columns.source,
                line=columns.line(second),
            )
        return assemble(columns.take(_without_duplicates(columns, groups)))

    sizes = tuple(int(size) + 1 for size in columns.sids.max(axis=0))
    words = pack_sids(columns.sids, sizes)
    order = sorted_order(words)
    words = [word[order] for word in words]
    first_of_sid = np.ones(len(order), dtype=bool)
    first_of_sid[1:] = np.any([word[1:] != word[:-1] for word in words], axis=0)
    trie = ItemTrie.from_sorted_words(words, sizes)
    del words
    index_dtype = np.int32 if len(order) < 2**31 - 1 else np.int64
    item_offsets = np.append(np.flatnonzero(first_of_sid), len(order)).astype(index_dtype)
    order = _settle_ties(columns, order, item_offsets)

    place = np.empty(len(order), dtype=index_dtype)
    place[order] = np.arange(len(order), dtype=index_dtype)
    id_rows = place[id_order]
    del place, id_order
    stored = _reorder(columns, order)
    version = content_version(stored, item_offsets, trie)
    return Assembled(stored, item_offsets, id_keys, id_rows, trie, version)


def _duplicate_groups(ids: IdColumn, keys: np.ndarray, order: np.ndarray) -> list[list[int]]:
    """Rows that carry the same id, each group in row order."""
    same = np.flatnonzero(keys[1:] == keys[:-1])
    if len(same) == 0:
        return []
    rows = np.unique(np.concatenate([order[same], order[same + 1]]))
    by_id: dict[int | str, list[int]] = {}  # equal hashes of different strings part here
    for row in rows.tolist():
        by_id.setdefault(ids[row], []).append(row)
    return [group for group in by_id.values() if len(group) > 1]


def _without_duplicates(columns: CatalogColumns, groups: list[list[int]]) -> np.ndarray:
    keep = np.ones(len(columns.ids), dtype=bool)
    for group in groups:
        best = group[0] if columns.weights is None else group[int(np.argmax(columns.weights[group]))]
        keep[group] = False
        keep[best] = True
    return np.flatnonzero(keep)


def _settle_ties(columns: CatalogColumns, order: np.ndarray, item_offsets: np.ndarray) -> np.ndarray:
    """Order the items of each SID by weight, heaviest first, then by id; SIDs with one item are left."""
    counts = np.diff(item_offsets)
    shared = np.repeat(counts > 1, counts)
    if not shared.any():
        return order
    rows = order[shared]
    groups = np.repeat(np.flatnonzero(counts > 1), counts[counts > 1])
    if columns.weights is not None:
        heft = -columns.weights[rows]
        inner = np.lexsort((heft, groups))
        rows, heft = rows[inner], heft[inner]
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (groups[1:] != groups[:-1]) | (heft[1:] != heft[:-1])
        groups = np.cumsum(new)
    ids = columns.ids.values
    if isinstance(ids, StringColumn):
        rows = ids.sort_within(rows, groups)
    else:
        rows = rows[np.lexsort((ids[rows], groups))]
    order[shared] = rows
    return order


def _reorder(columns: CatalogColumns, order: np.ndarray) -> CatalogColumns:
    return CatalogColumns(
        columns.ids.take(order),
        np.empty((0, columns.sids.shape[1]), dtype=np.int32),
        None if columns.titles is None else columns.titles.take(order),
        None if columns.metadata is None else columns.metadata.take(order),
        None if columns.weights is None else columns.weights[order],
        None,
        columns.source,
    )


def content_version(columns: CatalogColumns, item_offsets: np.ndarray, trie: ItemTrie) -> str:
    """Hash of a catalogue's arrays, columns in storage order."""
    digest = hashlib.blake2b(digest_size=8)

    def add(name: str, values: Any) -> None:
        digest.update(
            json.dumps([name, None if values is None else [str(values.dtype), len(values)]]).encode()
        )
        if values is not None:
            digest.update(np.ascontiguousarray(values).view(np.uint8).data)

    for level in range(trie.num_levels):
        add("offsets", trie.offsets[level])
        add("codes", trie.codes[level])
    add("items", item_offsets)
    add("weights", columns.weights)
    texts = [("titles", columns.titles), ("metadata", columns.metadata)]
    if isinstance(columns.ids.values, StringColumn):
        texts.append(("ids", columns.ids.values))
    else:
        add("ids", columns.ids.values)
    for name, text in texts:
        for part in ("data", "offsets", "valid"):
            add(f"{name}.{part}", None if text is None else getattr(text, part))
    return digest.hexdigest()
