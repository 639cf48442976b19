"""Columns of a catalogue as flat arrays: ten million items are a handful of buffers, not as many objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onela.errors import CatalogError, shown
from onela.items.trie import load_array

BOOLEANS = frozenset((bool, np.bool_))
"""Types of what becomes a number in an array of numbers."""
_FNV_OFFSET, _FNV_PRIME, _U64 = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1
_TAKE_ROWS = 1 << 18  # bounds the scratch memory of `take`


@dataclass(frozen=True, eq=False, repr=False)
class StringColumn:
    """Strings, or None, in one UTF-8 buffer.

    Attributes:
        data: [bytes] uint8.
        offsets: [n + 1] int64; string i is data[offsets[i] : offsets[i + 1]].
        valid: [n] bool, False for None; None when no string is missing.
    """

    data: np.ndarray
    offsets: np.ndarray
    valid: np.ndarray | None = None

    @classmethod
    def from_strings(cls, strings: Iterable[str | None]) -> StringColumn:
        """Raises UnicodeEncodeError for a string with a lone surrogate."""
        given = list(strings)
        valid = np.array([text is not None for text in given]) if None in given else None
        texts = [text or "" for text in given]
        whole = "".join(texts)
        if whole.isascii():  # a character is a byte
            data, lengths = whole.encode(), map(len, texts)
        else:
            encoded = [text.encode() for text in texts]
            data, lengths = b"".join(encoded), map(len, encoded)
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(lengths, dtype=np.int64, count=len(texts)), out=offsets[1:])
        return cls(np.frombuffer(data, dtype=np.uint8), offsets, valid)

    @classmethod
    def concatenate(cls, parts: Sequence[StringColumn]) -> StringColumn:
        starts = np.cumsum([0, *(len(part.data) for part in parts)])
        offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts)]
        valid = None
        if any(part.valid is not None for part in parts):
            valid = np.concatenate([part.validity for part in parts])
        data = np.concatenate([part.data for part in parts])
        return cls(data, np.concatenate([*offsets, starts[-1:]]).astype(np.int64), valid)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str | None:
        if self.valid is not None and not self.valid[row]:
            return None
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()

    def tolist(self) -> list[str | None]:
        """All of them as Python strings."""
        text, bounds = self.data.tobytes(), self.offsets.tolist()
        strings: list[str | None]
        if text.isascii():  # a character is a byte: cut after decoding, not before
            whole = text.decode()
            strings = [whole[start:end] for start, end in itertools.pairwise(bounds)]
        else:
            strings = [text[start:end].decode() for start, end in itertools.pairwise(bounds)]
        if self.valid is not None:
            for row in np.flatnonzero(~self.valid).tolist():
                strings[row] = None
        return strings

    @property
    def validity(self) -> np.ndarray:
        return np.ones(len(self), dtype=bool) if self.valid is None else self.valid

    def take(self, rows: np.ndarray) -> StringColumn:
        """The strings at `rows`, in that order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), dtype=np.uint8)
        for first in range(0, len(rows), _TAKE_ROWS):
            part = slice(first, first + _TAKE_ROWS)
            start, stop = offsets[first], offsets[min(first + _TAKE_ROWS, len(rows))]
            shift = self.offsets[rows[part]] - offsets[:-1][part]
            data[start:stop] = self.data[np.repeat(shift, lengths[part]) + np.arange(start, stop)]
        return StringColumn(data, offsets, None if self.valid is None else self.valid[rows])

    def equals(self, other: StringColumn) -> np.ndarray:
        """Where two columns of the same length hold the same text, [n] bool."""
        lengths = np.diff(self.offsets)
        same = lengths == np.diff(other.offsets)
        rows = np.flatnonzero(same & (lengths > 0))
        if len(rows):
            left, right = self, other
            if len(rows) < len(self):
                left, right = self.take(rows), other.take(rows)
            same[rows] = np.logical_and.reduceat(left.data == right.data, left.offsets[:-1])
        return same

    def sort_within(self, rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Rows in the order of their strings (by code point) inside each group; `groups` ascends.

        Eight bytes at a time, and only rows still tied go on to the next eight.
        """
        rows, active = rows.copy(), np.arange(len(rows))
        lengths = np.diff(self.offsets)
        longest = int(lengths[rows].max(initial=0))
        # The last round, past the end of every string, goes by length: it tells "a" from "a\0".
        for position in range(0, longest + 16, 8):
            part = rows[active]
            key = self._eight_bytes(part, position) if position < longest + 8 else lengths[part]
            order = np.lexsort((key, groups))
            rows[active] = part[order]
            key = key[order]
            new = np.ones(len(active), dtype=bool)
            new[1:] = (groups[1:] != groups[:-1]) | (key[1:] != key[:-1])
            groups = np.cumsum(new)
            tied = np.bincount(groups)[groups] > 1
            active, groups = active[tied], groups[tied]
            if len(active) == 0:
                break
        return rows

    def _eight_bytes(self, rows: np.ndarray, position: int) -> np.ndarray:
        """Bytes position .. position + 7 of strings as big-endian numbers, zeros past the end, [n] uint64."""
        value = np.zeros(len(rows), dtype=np.uint64)
        start, stop = self.offsets[rows] + position, self.offsets[rows + 1]
        for step in range(8):
            inside = start + step < stop
            value <<= np.uint64(8)
            value[inside] |= self.data[start[inside] + step]
        return value

    def hashes(self) -> np.ndarray:
        """64-bit FNV-1a of every string, [n] uint64: one pass per byte position, not per string."""
        lengths = np.diff(self.offsets)
        result = np.full(len(self), _FNV_OFFSET, dtype=np.uint64)
        rows = np.arange(len(self))
        for position in range(int(lengths.max(initial=0))):
            rows = rows[lengths[rows] > position]
            byte = self.data[self.offsets[rows] + position].astype(np.uint64)
            result[rows] = (result[rows] ^ byte) * np.uint64(_FNV_PRIME)
        return result

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}_data.npy", self.data)
        np.save(folder / f"{name}_offsets.npy", self.offsets)
        if self.valid is not None:
            np.save(folder / f"{name}_valid.npy", self.valid)

    @classmethod
    def load(cls, folder: Path, name: str, num_rows: int, num_bytes: int, nullable: bool) -> StringColumn:
        data = load_array(folder / f"{name}_data.npy", (num_bytes,), "u")
        offsets = load_array(folder / f"{name}_offsets.npy", (num_rows + 1,), "i")
        valid = load_array(folder / f"{name}_valid.npy", (num_rows,), "b") if nullable else None
        if int(offsets[-1]) != num_bytes:
            raise CatalogError(f"offsets of {name} do not span its text", path=str(folder))
        return cls(data, offsets, valid)


def hash_string(text: str) -> int:
    """What `StringColumn.hashes` gives for one string."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = ((value ^ byte) * _FNV_PRIME) & _U64
    return value


@dataclass(frozen=True, eq=False, repr=False)
class IdColumn:
    """Item ids: all integers ([n] int64) or all strings."""

    values: np.ndarray | StringColumn

    @property
    def kind(self) -> str:
        return "str" if isinstance(self.values, StringColumn) else "int"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> int | str:
        if isinstance(self.values, StringColumn):
            text = self.values[row]
            assert text is not None  # an id column has no missing values
            return text
        return int(self.values[row])

    def tolist(self) -> list[int | str]:
        """All of them as Python values."""
        if isinstance(self.values, StringColumn):
            return [text for text in self.values.tolist() if text is not None]  # none is missing
        return self.values.tolist()

    @classmethod
    def concatenate(cls, parts: Sequence[IdColumn]) -> IdColumn:
        strings = [part.values for part in parts if isinstance(part.values, StringColumn)]
        numbers = [part.values for part in parts if isinstance(part.values, np.ndarray)]
        return cls(StringColumn.concatenate(strings) if strings else np.concatenate(numbers))

    def take(self, rows: np.ndarray) -> IdColumn:
        return IdColumn(self.values.take(rows))

    def keys(self) -> np.ndarray:
        """One sortable number per id: the id itself, or the hash of a string."""
        return self.values.hashes() if isinstance(self.values, StringColumn) else self.values

    @property
    def longest(self) -> int:
        """Bytes of the longest id, 0 for integers."""
        return (
            int(np.diff(self.values.offsets).max(initial=0)) if isinstance(self.values, StringColumn) else 0
        )

    def key_of(self, item_id: object) -> int | None:
        """The key of one id, None if this column cannot hold such an id."""
        if isinstance(self.values, StringColumn):
            return hash_string(item_id) if isinstance(item_id, str) and is_unicode(item_id) else None
        if not isinstance(item_id, (int, np.integer)) or isinstance(item_id, bool):
            return None
        return int(item_id) if -(2**63) <= item_id < 2**63 else None

    def may_hold(self, item_id: object, longest: int) -> bool:
        """Whether one id has the type of these, exactly, and strings at most `longest` bytes."""
        if isinstance(self.values, StringColumn):
            if type(item_id) is not str or len(item_id) > longest:
                return False
            return is_unicode(item_id) and len(item_id.encode()) <= longest
        return type(item_id) is int and self.key_of(item_id) is not None


def is_unicode(text: str) -> bool:
    """Whether a string can be written as UTF-8: one with half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, eq=False, repr=False)
class CatalogColumns:
    """The rows of a catalogue as they were read, in file order.

    Attributes:
        ids: [n].
        sids: [n, num_levels] int32, published codes.
        titles, metadata: [n] or None if no item has any; metadata is JSON text.
        weights: [n] float64, or None if no item has any.
        lines: [n] int64, 1-based line or row in the source.
        source: the file, for error messages.
    """

    ids: IdColumn
    sids: np.ndarray
    titles: StringColumn | None = None
    metadata: StringColumn | None = None
    weights: np.ndarray | None = None
    lines: np.ndarray | None = None
    source: str | None = None

    def take(self, rows: np.ndarray) -> CatalogColumns:
        def pick(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        return CatalogColumns(
            self.ids.take(rows),
            self.sids[rows],
            None if self.titles is None else self.titles.take(rows),
            None if self.metadata is None else self.metadata.take(rows),
            pick(self.weights),
            pick(self.lines),
            self.source,
        )

    def line(self, row: int) -> int:
        return row + 1 if self.lines is None else int(self.lines[row])


def entries(values: object, field: str) -> list[Any]:
    """What a column given by a user holds, in its order. Raises `CatalogError` for what is no list or the like."""
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
        try:
            return list(values)
        except TypeError:  # an array of no dimension
            pass
    raise CatalogError(f"{field}: a list is expected, got {shown(values)}")


def text_column(texts: object, field: str) -> StringColumn:
    """A column of text given by a user, with None where there is none.

    Raises:
        CatalogError: no list, or an entry that is no text; `line` is its 1-based place.
    """
    given = entries(texts, field)
    if not set(map(type, given)) <= {str, type(None)}:  # NumPy has strings of its own
        for line, text in enumerate(given, start=1):
            if not isinstance(text, (str, type(None))):
                raise CatalogError(f"{field}: expected a string, got {shown(text)}", line=line)
    try:
        return StringColumn.from_strings(given)
    except UnicodeEncodeError:
        line = next(n for n, text in enumerate(given, start=1) if text is not None and not is_unicode(text))
        raise CatalogError(f"{field}: {given[line - 1]!r} is not valid Unicode", line=line) from None


def number_column(numbers: object, field: str) -> np.ndarray:
    """A column of numbers given by a user, [n] float64.

    Raises:
        CatalogError: no list, or an entry that is no number; `line` is its 1-based place.
    """
    given = numbers if isinstance(numbers, np.ndarray) and numbers.ndim else entries(numbers, field)
    plain = (
        given.dtype.kind in "iuf" if isinstance(given, np.ndarray) else set(map(type, given)) <= {int, float}
    )
    try:
        if plain or all(map(_is_number, given)):
            column = np.asarray(given, dtype=np.float64)
            if column.ndim == 1:
                return column
    except OverflowError:  # an integer that no float64 holds
        pass
    for line, number in enumerate(given, start=1):
        if not _is_number(number):
            raise CatalogError(f"{field}: expected a number, got {shown(number)}", line=line)
    raise CatalogError(f"{field}: a list of numbers is expected, got {shown(numbers)}")


def _is_number(value: Any) -> bool:
    """Whether a value is one number; texts and booleans, which NumPy takes for such, are none."""
    if isinstance(value, (str, bytes)) or type(value) in BOOLEANS:
        return False
    try:
        return np.asarray(value, dtype=np.float64).ndim == 0
    except (TypeError, ValueError, OverflowError):
        return False


def id_column(item_ids: object) -> np.ndarray | StringColumn:
    """Item ids from an array or a sequence, all integers or all strings.

    Raises:
        CatalogError: anything else, or an integer beyond 64 bits; `line` is the 1-based place.
    """
    if isinstance(item_ids, np.ndarray) and item_ids.ndim == 1 and item_ids.dtype.kind in "iu":
        if item_ids.dtype == np.uint64 and len(item_ids) and int(item_ids.max()) >= 2**63:
            place = int(np.argmax(item_ids >= 2**63))
            raise CatalogError(f"item_id: {item_ids[place]} does not fit 64 bits", line=place + 1)
        return item_ids.astype(np.int64, copy=False)
    values = item_ids.tolist() if isinstance(item_ids, np.ndarray) else list(item_ids)  # type: ignore[call-overload]
    kinds = set(map(type, values))
    if not kinds <= {int} and not kinds <= {str}:
        kind = type(values[0])
        wanted = {kind} if kind in (int, str) else set()
        place = next(place for place, value in enumerate(values) if type(value) not in wanted)
        raise CatalogError(
            f"item_id: expected all strings or all integers, got {values[place]!r}", line=place + 1
        )
    if kinds == {str}:
        return StringColumn.from_strings(values)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        place = next(place for place, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise CatalogError(f"item_id: {values[place]} does not fit 64 bits", line=place + 1) from None
