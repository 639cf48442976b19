"""Rows in, columns out: the one place that checks the fields of an item, whatever file it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from onela.errors import CatalogError, VocabularyError, shown
from onela.items.columns import CatalogColumns, IdColumn, StringColumn, is_unicode
from onela.items.sid_text import MAX_CODE, parse_sid_text
from onela.items.vocabulary import SidVocabulary

_BLOCK_ROWS = 1 << 16
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class CatalogItem:
    """One item of a catalogue.

    Attributes:
        item_id: what the recommender's users call it; str or int, one kind per catalogue.
        sid: its codes, as published, or the SID written out (`<a_1><b_2><c_3>`).
        title: for people.
        metadata: any JSON value.
        weight: among items on one SID the heavier comes first; an item without a weight counts as 0.
    """

    item_id: int | str
    sid: Sequence[int] | str
    title: str | None = None
    metadata: Any = None
    weight: float | None = None


class CatalogBuilder:
    """Collects items and checks them; `finish` gives the columns.

    Args:
        vocabulary: if given, every code must have a token, and depth is the vocabulary's.
        source: file name for error messages.
        num_levels: depth of every SID; default: the vocabulary's, else that of the first item.
    """

    def __init__(
        self,
        vocabulary: SidVocabulary | None = None,
        source: str | None = None,
        num_levels: int | None = None,
    ) -> None:
        if vocabulary is not None and num_levels not in (None, vocabulary.num_levels):
            raise CatalogError(
                f"num_levels: {num_levels}, but the vocabulary has {vocabulary.num_levels} levels"
            )
        self.vocabulary = vocabulary
        self.source = source
        self.num_levels = vocabulary.num_levels if vocabulary is not None else num_levels
        self._id_type: type | None = None
        self._id_line = 0
        self._rows: list[tuple[Any, ...]] = []
        self._has = {"title": False, "metadata": False, "weight": False}
        self._blocks: list[CatalogColumns] = []

    def add(
        self,
        item_id: Any,
        sid: Any,
        title: Any = None,
        metadata: Any = None,
        weight: Any = None,
        *,
        line: int,
    ) -> None:
        """One item. Errors name `line`, the 1-based line or row it stands on."""
        if type(item_id) is not self._id_type:
            self._check_id_type(item_id, line)
        codes = self.check_sid(sid, line)
        if title is not None and type(title) is not str:
            self.fail(f"title: expected a string, got {title!r}", line)
        if weight is not None:
            weight = self._check_weight(weight, line)
        text = None if metadata is None else self._to_json(metadata, line)
        self._rows.append((item_id, codes, title, text, weight, line))
        if len(self._rows) >= _BLOCK_ROWS:
            self._flush()

    def add_block(
        self,
        ids: np.ndarray | StringColumn,
        sids: np.ndarray,
        titles: StringColumn | None = None,
        metadata: StringColumn | None = None,
        weights: np.ndarray | None = None,
        *,
        first_line: int,
    ) -> None:
        """Many items at once, as columns whose types the caller has checked; `metadata` is JSON text."""
        self._flush()
        if len(ids) == 0:
            return
        self._check_id_type("" if isinstance(ids, StringColumn) else 0, first_line)
        if self.num_levels is None:
            self.num_levels = sids.shape[1]
        if sids.shape[1] != self.num_levels:
            self._fail(f"sid: {sids.shape[1]} levels, expected {self.num_levels}", first_line)
        if weights is not None and not np.isfinite(weights).all():
            row = int(np.flatnonzero(~np.isfinite(weights))[0])
            self._fail(f"weight: expected a finite number, got {weights[row]}", first_line + row)
        stop = first_line + len(ids)
        lines = np.arange(first_line, stop, dtype=np.int32 if stop < 2**31 else np.int64)
        # A column that is there but empty is as good as none, and must not make another version.
        titles = None if titles is None or not titles.validity.any() else titles
        metadata = None if metadata is None or not metadata.validity.any() else metadata
        for name, column in (("title", titles), ("metadata", metadata), ("weight", weights)):
            self._has[name] |= column is not None
        self._append(CatalogColumns(IdColumn(ids), sids, titles, metadata, weights, lines))

    def fail(self, message: str, line: int) -> NoReturn:
        """Refuse a row; if an earlier one, its codes still unchecked, is wrong too, that one is named."""
        self._flush()
        self._fail(message, line)

    def finish(self) -> CatalogColumns:
        """All rows as columns.

        Raises:
            CatalogError: no item was added.
        """
        self._flush()
        if not self._blocks:
            raise CatalogError("no item in it", path=self.source)
        blocks, self._blocks = self._blocks, []
        if len(blocks) == 1:
            return replace(blocks[0], source=self.source)
        weights = [np.zeros(len(block.ids)) if block.weights is None else block.weights for block in blocks]
        return CatalogColumns(
            IdColumn.concatenate([block.ids for block in blocks]),
            np.concatenate([block.sids for block in blocks]),
            self._text([block.titles for block in blocks], blocks) if self._has["title"] else None,
            self._text([block.metadata for block in blocks], blocks) if self._has["metadata"] else None,
            np.concatenate(weights) if self._has["weight"] else None,
            np.concatenate([block.lines for block in blocks if block.lines is not None]),
            self.source,
        )

    # ---- checks of one row

    def _check_id_type(self, item_id: Any, line: int) -> None:
        if type(item_id) not in (int, str):
            self.fail(f"item_id: expected a string or an integer, got {item_id!r}", line)
        if self._id_type is None:
            self._id_type, self._id_line = type(item_id), line
        elif type(item_id) is not self._id_type:
            here, there = type(item_id).__name__, self._id_type.__name__
            self.fail(
                f"item_id: {item_id!r} is of type {here}, but line {self._id_line} has {there}; use one type",
                line,
            )

    def check_sid(self, sid: Any, line: int) -> Sequence[int]:
        """Codes of one SID, as a list or written out, once depth and types are known to be right."""
        if type(sid) in (list, tuple) and sid and type(sid[0]) is str and all(type(t) is str for t in sid):
            sid = "".join(sid)
        if type(sid) is str:
            try:
                sid = parse_sid_text(sid) if self.vocabulary is None else self.vocabulary.parse_sid(sid)
            except VocabularyError as error:
                self.fail(f"sid: {error}", line)
        elif type(sid) not in (list, tuple):
            self.fail(f"sid: expected a list of codes or a string of SID tokens, got {sid!r}", line)
        if len(sid) != self.num_levels:
            if self.num_levels is not None or not sid:
                expected = "at least 1" if self.num_levels is None else self.num_levels
                self.fail(f"sid: {len(sid)} levels, expected {expected}", line)
            self.num_levels = len(sid)
        for code in sid:
            if type(code) is not int:
                self.fail(f"sid: {code!r} is not an integer code", line)
            if not 0 <= code <= MAX_CODE:
                self.fail(f"sid: code {code} is out of range 0..{MAX_CODE}", line)
        return sid

    def _check_weight(self, weight: Any, line: int) -> float:
        if type(weight) not in (int, float) or not -1e308 < weight < 1e308:
            self.fail(f"weight: expected a finite number, got {weight!r}", line)
        return float(weight)

    def _to_json(self, value: Any, line: int) -> str:
        try:
            return to_json(value)
        except (TypeError, ValueError, RecursionError) as error:
            self.fail(f"metadata: {error}", line)

    # ---- blocks

    def _flush(self) -> None:
        """Turn the rows at hand into one block of columns."""
        if not self._rows:
            return
        ids, sids, titles, metadata, weights, lines = zip(*self._rows)
        self._rows = []
        present = {
            name: values.count(None) < len(values)
            for name, values in (("title", titles), ("metadata", metadata), ("weight", weights))
        }
        for name, there in present.items():
            self._has[name] |= there
        if self._id_type is int:
            bad = next((row for row, value in enumerate(ids) if value not in _INT64), None)
            if bad is not None:
                self._fail(f"item_id: {ids[bad]} does not fit 64 bits", lines[bad])
            column: np.ndarray | StringColumn = np.array(ids, dtype=np.int64)
        else:
            column = self._encode(ids, "item_id", lines)
        self._append(
            CatalogColumns(
                IdColumn(column),
                np.array(sids, dtype=np.int32),
                self._encode(titles, "title", lines) if present["title"] else None,
                self._encode(metadata, "metadata", lines) if present["metadata"] else None,
                np.array([w or 0.0 for w in weights]) if present["weight"] else None,
                np.array(lines, dtype=np.int64),
            )
        )

    def _append(self, block: CatalogColumns) -> None:
        """Check a block's codes, and keep it."""
        limit = f"0..{MAX_CODE}" if self.vocabulary is None else "the vocabulary"
        for first in range(0, len(block.sids), _BLOCK_ROWS):
            sids = block.sids[first : first + _BLOCK_ROWS]
            if self.vocabulary is None:
                bad = (sids < 0) | (sids > MAX_CODE)
            else:
                bad = self.vocabulary.encode(sids, strict=False) < 0
            if bad.any():
                row, level = (int(place[0]) for place in np.nonzero(bad))
                message = (
                    f"sid: code {int(sids[row, level])} of level {level} is out of range, not in {limit}"
                )
                self._fail(message, block.line(first + row))
        self._blocks.append(replace(block, sids=block.sids.astype(np.int32, copy=False)))

    def _encode(self, strings: Sequence[Any], field: str, lines: Sequence[int]) -> StringColumn:
        try:
            return StringColumn.from_strings(strings)
        except UnicodeEncodeError:
            for row, text in enumerate(strings):
                if text is not None and not is_unicode(text):
                    self._fail(f"{field}: {text!r} is not valid Unicode", lines[row])
            raise

    def _text(self, parts: list[StringColumn | None], blocks: list[CatalogColumns]) -> StringColumn:
        missing = [
            StringColumn.from_strings([None] * len(b.ids)) if p is None else p for p, b in zip(parts, blocks)
        ]
        return StringColumn.concatenate(missing)

    def _fail(self, message: str, line: int) -> NoReturn:
        raise CatalogError(message, path=self.source, line=line)


def add_items(builder: CatalogBuilder, items: Any) -> None:
    """Add `CatalogItem`s, or mappings with the same fields, in order; item k counts as line k.

    Numbers may be NumPy's, and SIDs rows of its arrays.
    """
    if not isinstance(items, Iterable):
        raise CatalogError(f"items: a list of CatalogItem or of mappings is expected, got {shown(items)}")
    for number, item in enumerate(items, start=1):
        if isinstance(item, CatalogItem):
            item_id, sid, weight = map(_plain, (item.item_id, item.sid, item.weight))
            builder.add(item_id, sid, item.title, item.metadata, weight, line=number)
        elif isinstance(item, Mapping):
            plain = {name: value if name == "metadata" else _plain(value) for name, value in item.items()}
            add_record(builder, plain, number)
        else:
            builder.fail(f"expected a CatalogItem or a mapping, got {type(item).__name__}", number)


def _plain(value: Any) -> Any:
    """NumPy's numbers, strings and arrays, and lists of such numbers, as Python's; a file never holds them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)) and any(isinstance(code, np.generic) for code in value):
        return [code.item() if isinstance(code, np.generic) else code for code in value]
    return value


FIELDS = ("item_id", "sid", "title", "metadata", "weight")
_FIELD_SET = frozenset(FIELDS)


def add_record(builder: CatalogBuilder, record: Mapping[str, Any], line: int) -> None:
    """Add one mapping whose keys are the fields of `CatalogItem`."""
    if "item_id" not in record or "sid" not in record:
        missing = "sid" if "item_id" in record else "item_id"
        builder.fail(f"field {missing!r} is missing", line)
    if not record.keys() <= _FIELD_SET:
        unknown = [field for field in record if field not in FIELDS]
        known = ", ".join(FIELDS)
        builder.fail(
            f"unknown field {unknown[0]!r}; known are {known}; put anything else into metadata", line
        )
    get = record.get
    builder.add(record["item_id"], record["sid"], get("title"), get("metadata"), get("weight"), line=line)


def to_json(value: Any) -> str:
    """Metadata as it is stored: one spelling, so that the same values give the same version."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
