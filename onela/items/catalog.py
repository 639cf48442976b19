"""The items that may be recommended: which SID stands for which, and what to call them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from onela.errors import CatalogError, ConfigError, shown
from onela.items import storage
from onela.items.assembly import Assembled, assemble, content_version
from onela.items.builder import CatalogBuilder, CatalogItem, add_items, to_json
from onela.items.columns import (
    BOOLEANS,
    CatalogColumns,
    IdColumn,
    StringColumn,
    entries,
    id_column,
    number_column,
    text_column,
)
from onela.items.detect import detect_format
from onela.items.readers import ReadOptions, read_catalog
from onela.items.trie import ItemTrie
from onela.items.vocabulary import SidVocabulary

Expand = Literal["best", "all"]
Duplicates = Literal["error", "best"]
_RECORDS_AT_ONCE = 1 << 14
_LONG_ID = 256  # bytes up to which an id is hashed though no item has one as long


@dataclass(frozen=True, eq=False, repr=False)
class ItemCatalog:
    """An immutable catalogue in flat arrays; build it with `load`, `from_items` or `from_arrays`.

    Two numbers name things here, so that nothing has to be searched while serving:

        sid_index  a distinct SID: its place among all of them in sorted order, which is its leaf in the trie
        item       an item: its row in storage; those on one SID lie side by side, heaviest first, then by id

    Attributes:
        trie: the legal SIDs; in code indices of `vocabulary`, or in published codes if there is none.
        version: short hash of the content; the same items give the same version, in whatever order they came.
        vocabulary: the vocabulary that the catalogue is bound to, None if unbound.
    """

    trie: ItemTrie
    version: str
    vocabulary: SidVocabulary | None
    _parts: Assembled

    # ---- constructors

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        vocabulary: SidVocabulary | None = None,
        format: str = "auto",
        *,
        num_levels: int | None = None,
        radix: int | None = None,
        info: str | os.PathLike[str] | None = None,
        duplicates: Duplicates = "error",
    ) -> ItemCatalog:
        """Read a catalogue from a file, or memory-map one that `save` wrote.

        Args:
            path: a file in one of the formats of `docs/items.md`, or a directory.
            vocabulary: bind the catalogue to it, and refuse codes that have no token.
            format: "auto" (by content), or its name: onela, jsonl, parquet, openonerec, minionerec, nvidia, xllm.
            num_levels: depth of every SID, if neither a vocabulary nor the file says.
            radix: codes per level in the packed keys of `sid2pid.json`; default: the vocabulary's codebook size.
            info: the titles that go with a MiniOneRec `index.json`.
            duplicates: "error", or "best" to keep the heaviest row of an item that is there more than once.
        Raises:
            CatalogError: malformed (names file and line), format not recognised, or no item.
            ConfigError: an unknown option value, or one that does not go with the format.
        """
        source = Path(path)
        try:
            if format == "onela" or (format == "auto" and detect_format(source) == "onela"):
                parts = storage.load(source)
                if vocabulary is not None:  # it is going to be served, or to be compared with the tokenizer
                    storage.check(parts)
                return cls._from_parts(parts, vocabulary)
            options = ReadOptions(vocabulary, num_levels, radix, None if info is None else Path(info))
            columns = read_catalog(source, format, options)
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise CatalogError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
        return cls._from_columns(columns, vocabulary, duplicates)

    @classmethod
    def from_items(
        cls,
        items: Iterable[CatalogItem | Mapping[str, Any]],
        vocabulary: SidVocabulary | None = None,
        *,
        duplicates: Duplicates = "error",
    ) -> ItemCatalog:
        """Build from `CatalogItem`s, or mappings with the same fields.

        Raises:
            CatalogError: as `load`; `line` counts the items from 1.
        """
        builder = CatalogBuilder(vocabulary)
        add_items(builder, items)
        return cls._from_columns(builder.finish(), vocabulary, duplicates)

    @classmethod
    def from_arrays(
        cls,
        item_ids: Any,
        sids: Any,
        *,
        titles: Sequence[str | None] | None = None,
        metadata: Sequence[Any] | None = None,
        weights: Any = None,
        vocabulary: SidVocabulary | None = None,
        duplicates: Duplicates = "error",
    ) -> ItemCatalog:
        """Build from columns, without a Python object per item where ids are a numpy integer array.

        Args:
            item_ids: [M] integers or strings.
            sids: [M, num_levels] integers, published codes.
            titles: [M] strings. metadata: [M] JSON values. In both None entries are allowed.
            weights: [M] finite numbers.
        Raises:
            CatalogError: columns of different length, wrong types, and as `load`.
        """
        sids = _code_rows(sids)
        given_ids = item_ids if isinstance(item_ids, np.ndarray) else entries(item_ids, "item_ids")
        try:
            ids = id_column(given_ids)
        except UnicodeEncodeError:
            ids = text_column(given_ids, "item_id")  # which says where
        heft = None if weights is None else number_column(weights, "weights")
        names = None if titles is None else text_column(titles, "titles")
        texts = None if metadata is None else text_column(_json_texts(metadata), "metadata")
        for name, column in (("item_ids", ids), ("titles", names), ("metadata", texts), ("weights", heft)):
            if column is not None and len(column) != len(sids):
                raise CatalogError(f"{name}: {len(column)} entries, but sids has {len(sids)}")
        builder = CatalogBuilder(vocabulary)
        builder.add_block(ids, sids, names, texts, heft, first_line=1)
        return cls._from_columns(builder.finish(), vocabulary, duplicates)

    @classmethod
    def _from_columns(
        cls, columns: CatalogColumns, vocabulary: SidVocabulary | None, duplicates: str
    ) -> ItemCatalog:
        return cls._from_parts(assemble(columns, duplicates), vocabulary)

    @classmethod
    def _from_parts(cls, parts: Assembled, vocabulary: SidVocabulary | None) -> ItemCatalog:
        unbound = cls(parts.trie, parts.version, None, parts)
        return unbound if vocabulary is None else unbound.bind(vocabulary)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the catalogue into a directory that `load` memory-maps.

        A catalogue that is there already is replaced in one move, and a process that has it mapped keeps what it
        has. What is saved are published codes: the binding to a vocabulary is made again on loading.

        Raises:
            CatalogError: `path` is a file, or a directory that holds anything but a catalogue, or cannot be written.
        """
        storage.save(self._parts, path)

    def verify(self) -> None:
        """Read all that a saved catalogue holds, and compare it with its version.

        `load` does not: of ten million items it takes half a second and more, and as long as the disk needs for the
        titles and metadata that nobody has asked for yet.

        Raises:
            CatalogError: an array leads to places that are not there, or something is not what was saved.
        """
        parts = self._parts
        storage.check(parts)
        if not np.array_equal(parts.columns.ids.keys().take(parts.id_rows), parts.id_keys):
            raise CatalogError("id_keys.npy is damaged; save the catalogue again", path=self.source)
        found = content_version(parts.columns, parts.item_offsets, parts.trie)
        if found != self.version:
            raise CatalogError(
                f"is damaged: its content has the version {found}, not {self.version}; save the catalogue again",
                path=self.source,
            )

    def bind(self, vocabulary: SidVocabulary) -> ItemCatalog:
        """The same catalogue with its trie in the code indices of a vocabulary; shares all memory it can.

        Raises:
            CatalogError: another depth, or a code that has no token (names an item that uses it).
        """
        published = self._parts.trie
        if vocabulary.num_levels != self.num_levels:
            raise CatalogError(
                f"the catalogue has {self.num_levels} levels, the vocabulary {vocabulary.num_levels}",
                path=self._parts.columns.source,
            )
        mappings: list[np.ndarray | None] = []
        for level, size in enumerate(published.codebook_sizes):
            known = vocabulary.codes(level)
            in_range = known < size
            index = np.full(size, -1, dtype=np.int32)
            index[known[in_range]] = np.flatnonzero(in_range)
            used = np.zeros(size, dtype=bool)
            used[published.codes[level]] = True
            lost = np.flatnonzero(used & (index < 0))
            if len(lost):
                self._refuse_code(level, int(lost[0]), len(lost))
            unchanged = np.array_equal(index[used], np.flatnonzero(used))
            mappings.append(None if unchanged else index)
        trie = published.with_codes(mappings, vocabulary.codebook_sizes)
        return replace(self, trie=trie, vocabulary=vocabulary)

    def _refuse_code(self, level: int, code: int, count: int) -> NoReturn:
        """Name an item below the first edge that carries a code without a token."""
        published = self._parts.trie
        node = int(np.flatnonzero(published.codes[level] == code)[0])
        for below in range(level + 1, self.num_levels):
            node = int(published.offsets[below][node])
        item_id = self.item_id(self.items_of(node)[0])
        more = f"; {count} codes of this level have none" if count > 1 else ""
        raise CatalogError(
            f"item_id {item_id!r}: code {code} of level {level} has no token in the vocabulary{more}",
            path=self._parts.columns.source,
        )

    # ---- size

    @property
    def num_items(self) -> int:
        return len(self._parts.columns.ids)

    @property
    def num_sids(self) -> int:
        """Number of distinct SIDs."""
        return self.trie.num_sids

    @property
    def num_levels(self) -> int:
        return self.trie.num_levels

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """The vocabulary's, or for an unbound catalogue the largest code of each level plus one."""
        return self.trie.codebook_sizes

    @property
    def max_items_per_sid(self) -> int:
        return int(np.diff(self._parts.item_offsets).max())

    def __len__(self) -> int:
        return self.num_items

    def __repr__(self) -> str:
        return (
            f"ItemCatalog(num_items={self.num_items}, num_sids={self.num_sids}, "
            f"codebook_sizes={self.codebook_sizes}, version={self.version!r})"
        )

    @property
    def item_offsets(self) -> np.ndarray:
        """[num_sids + 1]; the items of SID s are `item_offsets[s] : item_offsets[s + 1]`. Never write into it."""
        return self._parts.item_offsets

    @property
    def source(self) -> str | None:
        """The file or directory that the catalogue was read from."""
        return self._parts.columns.source

    @property
    def id_kind(self) -> str:
        """ "int" or "str": what all item ids are."""
        return self._parts.columns.ids.kind

    @property
    def metadata_texts(self) -> StringColumn | None:
        """The items' metadata as JSON text, None if no item has any."""
        return self._parts.columns.metadata

    # ---- SIDs

    def lookup(self, sids: Any) -> np.ndarray:
        """Which SIDs of the catalogue these are, [M, num_levels] code indices to [M] int64; -1 if none."""
        return self.trie.find(sids)

    def sids(self, sid_indices: Any) -> np.ndarray:
        """Published codes of SIDs, [M] to [M, num_levels] int32."""
        return self._parts.trie.sids(sid_indices)

    def items_of(self, sid_index: int, *, expand: Expand = "all") -> list[int]:
        """The items on one SID, best first; `expand="best"` gives the first alone.

        Raises:
            CatalogError: `sid_index` out of range. ConfigError: unknown `expand`.
        """
        if not 0 <= sid_index < self.num_sids:
            raise CatalogError(f"sid_index: {sid_index} is out of range 0..{self.num_sids - 1}")
        if expand not in ("best", "all"):
            raise ConfigError(f"expand: {expand!r}, expected 'best' or 'all'")
        offsets = self._parts.item_offsets
        start = int(offsets[sid_index])
        return [start] if expand == "best" else list(range(start, int(offsets[sid_index + 1])))

    def items_at(self, sid_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items on many SIDs, best first on each.

        Args:
            sid_indices: [M] integers.
        Returns:
            bounds: [M + 1] int64. items: int64, those of SID i are `items[bounds[i] : bounds[i + 1]]`.
        Raises:
            CatalogError: a SID that is out of range.
        """
        if len(sid_indices) and not 0 <= int(sid_indices.min()) <= int(sid_indices.max()) < self.num_sids:
            raise CatalogError(f"sid_indices: one is out of range 0..{self.num_sids - 1}")
        starts = np.asarray(self._parts.item_offsets[sid_indices], dtype=np.int64)
        counts = self._parts.item_offsets[sid_indices + 1] - starts
        bounds = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        return bounds, np.repeat(starts - bounds[:-1], counts) + np.arange(bounds[-1])

    # ---- items

    def item_ids(self, items: np.ndarray) -> list[int | str]:
        """`item_id` of many items, [M] integers within the catalogue."""
        return self._parts.columns.ids.take(items).tolist()

    def titles(self, items: np.ndarray) -> list[str | None]:
        """`title` of many items, [M] integers within the catalogue."""
        titles = self._parts.columns.titles
        return [None] * len(items) if titles is None else titles.take(items).tolist()

    def item_id(self, item: int) -> int | str:
        """What the catalogue calls an item, as it was given."""
        return self._parts.columns.ids[self._check(item)]

    def title(self, item: int) -> str | None:
        titles = self._parts.columns.titles
        return None if titles is None else titles[self._check(item)]

    def metadata(self, item: int) -> Any:
        """The JSON value that came with an item, None if none did."""
        texts = self._parts.columns.metadata
        text = None if texts is None else texts[self._check(item)]
        return None if text is None else json.loads(text)

    def weight(self, item: int) -> float:
        """The weight that orders items on one SID; 0 where none was given."""
        weights = self._parts.columns.weights
        return 0.0 if weights is None else float(weights[self._check(item)])

    def sid_index_of(self, item: int) -> int:
        """The SID that an item is on."""
        return int(np.searchsorted(self._parts.item_offsets, self._check(item), side="right")) - 1

    def find(self, item_id: int | str) -> int | None:
        """The item of this id, None if there is none."""
        keys, ids = self._parts.id_keys, self._parts.columns.ids
        key = ids.key_of(item_id)
        if key is None:
            return None
        wanted = keys.dtype.type(key)
        place = int(np.searchsorted(keys, wanted))
        while place < len(keys) and keys[place] == wanted:  # different strings may share a hash
            item = int(self._parts.id_rows[place])
            if ids[item] == item_id:
                return item
            place += 1
        return None

    def find_many(self, item_ids: Sequence[int | str]) -> np.ndarray:
        """The items of many ids, [M] int64; -1 where there is none.

        No Python per id, but for hash collisions, and where some are of another type or much longer than any here.
        """
        column, longest = self._parts.columns.ids, self._parts.longest_id
        try:
            wanted = IdColumn(id_column(item_ids))
        except (CatalogError, UnicodeEncodeError):
            wanted = None
        # Hashing takes a pass per byte of the longest: a megabyte that cannot be found would take seconds.
        if wanted is None or wanted.kind != column.kind or wanted.longest > max(longest, _LONG_ID):
            known = [place for place, item_id in enumerate(item_ids) if column.may_hold(item_id, longest)]
            result = np.full(len(item_ids), -1, dtype=np.int64)
            if known:
                result[known] = self.find_many([item_ids[place] for place in known])
            return result
        keys = wanted.keys()
        places = self._parts.id_lookup.find(keys)
        items = self._parts.id_rows.take(places).astype(np.int64)
        hit = self._parts.id_keys.take(places) == keys
        if isinstance(wanted.values, StringColumn) and isinstance(column.values, StringColumn):
            rows = np.flatnonzero(hit)
            hit[rows] = column.values.take(items[rows]).equals(wanted.values.take(rows))
            for row in rows[~hit[rows]].tolist():  # another string with the same hash
                found = self.find(item_ids[row])
                if found is not None:
                    items[row], hit[row] = found, True
        return np.where(hit, items, -1)

    def __contains__(self, item_id: int | str) -> bool:
        return self.find(item_id) is not None

    def record(self, item: int) -> CatalogItem:
        """All that is known of an item; its SID in published codes."""
        return self._record(item, tuple(self.sids([self.sid_index_of(item)])[0].tolist()))

    def records(self) -> Iterator[CatalogItem]:
        """All items, in storage order."""
        offsets = self._parts.item_offsets
        for first in range(0, self.num_sids, _RECORDS_AT_ONCE):
            block = range(first, min(first + _RECORDS_AT_ONCE, self.num_sids))
            for sid_index, sid in zip(block, self.sids(np.arange(block.start, block.stop)).tolist()):
                for item in range(offsets[sid_index], offsets[sid_index + 1]):
                    yield self._record(item, tuple(sid))

    def _record(self, item: int, sid: tuple[int, ...]) -> CatalogItem:
        weight = None if self._parts.columns.weights is None else self.weight(item)
        return CatalogItem(self.item_id(item), sid, self.title(item), self.metadata(item), weight)

    def _check(self, item: int) -> int:
        if not 0 <= item < self.num_items:
            raise CatalogError(f"item: {item} is out of range 0..{self.num_items - 1}")
        return item


def _code_rows(sids: Any) -> np.ndarray:
    """SIDs given by a user, [M, num_levels] integers. Raises `CatalogError` for anything else, booleans too."""
    try:
        rows = np.asarray(sids)
    except ValueError:  # rows of different length, or lists in the place of codes
        lengths = [len(row) if isinstance(row, Sized) else 0 for row in sids]
        for line, (row, length) in enumerate(zip(sids, lengths), start=1):
            if length != lengths[0]:
                raise CatalogError(
                    f"sids: {shown(row)} has {length} levels, expected {lengths[0]}", line=line
                ) from None
        line, row = next(
            (line, row)
            for line, row in enumerate(sids, start=1)
            if any(isinstance(code, Sized) for code in row)
        )
        raise CatalogError(f"sids: {shown(row)} has a list, expected integers", line=line) from None
    if rows.ndim != 2 or rows.shape[1] == 0 or (rows.size and rows.dtype.kind not in "iu"):
        given = f"{rows.dtype} {list(rows.shape)}"
        raise CatalogError(f"sids: expected integers of shape [M, num_levels], got {given}")
    # Among integers a boolean becomes one; an array has none.
    if isinstance(sids, (list, tuple)) and not BOOLEANS.isdisjoint(
        map(type, itertools.chain.from_iterable(sids))
    ):
        place = next(place for place, row in enumerate(sids) if not BOOLEANS.isdisjoint(map(type, row)))
        raise CatalogError(f"sids: {shown(sids[place])} has a boolean, expected integers", line=place + 1)
    return rows


def _json_texts(metadata: Any) -> list[str | None]:
    """Metadata given by a user as it is stored. Raises `CatalogError` for what is no JSON value."""
    texts: list[str | None] = []
    for line, value in enumerate(entries(metadata, "metadata"), start=1):
        try:
            texts.append(None if value is None else to_json(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise CatalogError(f"metadata: {error}", line=line) from None
    return texts
