"""Which items carry which metadata value: the catalogue's metadata turned inside out, for filters."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from onela.errors import CatalogError, RequestError
from onela.items.catalog import ItemCatalog

Value = tuple[str, Any]
"""A JSON scalar with its kind, so that `true` is not `1`."""
Filter = tuple[tuple[str, tuple[Value, ...]], ...]
"""A filter in one spelling: attributes in order, each with its values in order."""

MAX_VALUES = 65536
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string"}
_REMEMBERED_TEXTS = 1 << 16


def not_a_filter(given: Any) -> RequestError:
    """What is said of something else in a filter's place."""
    return RequestError("filter", "a mapping of attributes' names to values is expected", value=given)


class AttributeIndex:
    """For every (attribute, value) of the metadata, the items that have it.

    Metadata counts where it is a JSON object; of that, the entries that are strings, numbers, booleans, or lists of
    them (an item then has each value). An attribute with more than `MAX_VALUES` values, say a URL, is left out.

    Attributes:
        names: attributes that can be filtered by. too_many: attributes that were left out.
    Raises:
        CatalogError: a text that is no JSON, in a saved catalogue that is damaged.
    """

    def __init__(self, catalog: ItemCatalog) -> None:
        self.num_items = catalog.num_items
        self._pairs: dict[tuple[str, Value], int] = {}
        self._num_values: dict[str, int] = {}
        self._source = catalog.source
        self._read(catalog)
        self.too_many = frozenset(name for name, count in self._num_values.items() if count > MAX_VALUES)
        self.names = frozenset(self._num_values) - self.too_many

    def parse(self, filter: Mapping[str, Any]) -> Filter:
        """Bring a request's filter into one spelling.

        Raises:
            RequestError: an attribute that no item has, or a value that is no scalar or list of scalars.
        """
        if not isinstance(filter, Mapping) or not all(isinstance(name, str) for name in filter):
            raise not_a_filter(filter)
        parsed = []
        for name in sorted(filter):
            field = f"filter.{name}"
            if name in self.too_many:
                raise RequestError(field, f"has more than {MAX_VALUES} values, and cannot be filtered by")
            if name not in self.names:
                known = (
                    f"known are {', '.join(sorted(self.names))}" if self.names else "they have no metadata"
                )
                raise RequestError(field, f"no item of the catalogue has this attribute; {known}")
            wanted = filter[name]
            values = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            values = [value.item() if isinstance(value, np.generic) else value for value in values]
            if not all(type(value) in _KINDS for value in values):
                raise RequestError(field, "a string, number, boolean, or a list of them", value=wanted)
            parsed.append((name, tuple(sorted({_value(value) for value in values}))))
        return tuple(parsed)

    def matching(self, filter: Filter) -> np.ndarray:
        """Items that have, for every attribute of the filter, one of its values: [num_items] bool."""
        result: np.ndarray | None = None
        for name, values in filter:
            mask = np.zeros(self.num_items, dtype=bool)
            for value in values:
                pair = self._pairs.get((name, value))
                if pair is not None:
                    mask[self._items[self._starts[pair] : self._starts[pair + 1]]] = True
            result = mask if result is None else result & mask
        return np.ones(self.num_items, dtype=bool) if result is None else result

    def _read(self, catalog: ItemCatalog) -> None:
        """One pass over the texts; equal texts, which are frequent, are parsed once."""
        column = catalog.metadata_texts
        texts, pairs, lengths = array("q"), array("q"), array("q", [0])
        if column is not None:
            remembered: dict[bytes, int] = {}
            blob = column.data.tobytes()
            start = 0
            for end in column.offsets[1:].tolist():
                text = blob[start:end]
                start = end
                number = remembered.get(text)
                if number is None:
                    number = len(lengths) - 1
                    pairs.extend(self._parse(text))
                    lengths.append(len(pairs))
                    if len(remembered) >= _REMEMBERED_TEXTS:
                        remembered.clear()
                    remembered[text] = number
                texts.append(number)
        bounds = np.frombuffer(lengths, dtype=np.int64)
        text_of_item = np.frombuffer(texts, dtype=np.int64) if len(texts) else np.zeros(0, dtype=np.int64)
        counts = np.diff(bounds)[text_of_item] if len(text_of_item) else text_of_item
        items = np.repeat(np.arange(len(text_of_item)), counts)
        before = np.cumsum(counts) - counts
        place = np.arange(len(items)) - np.repeat(before - bounds[text_of_item], counts)
        pair_of = np.frombuffer(pairs, dtype=np.int64)[place] if len(items) else items
        order = np.argsort(pair_of, kind="stable")
        self._items = items[order].astype(np.int32 if catalog.num_items < 2**31 else np.int64)
        self._starts = np.searchsorted(pair_of[order], np.arange(len(self._pairs) + 1))

    def _parse(self, text: bytes) -> list[int]:
        """Numbers of the (attribute, value) pairs in one metadata text."""
        try:
            metadata = json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise CatalogError(f"metadata {text[:80]!r} is not JSON: {error}", path=self._source) from error
        if not isinstance(metadata, dict):
            return []
        found = set()
        for name, entry in metadata.items():
            for value in entry if isinstance(entry, list) else [entry]:
                if type(value) not in _KINDS:
                    continue
                key = (name, _value(value))
                number = self._pairs.get(key)
                if number is None:
                    count = self._num_values.get(name, 0)
                    self._num_values[name] = min(count, MAX_VALUES) + 1
                    if count >= MAX_VALUES:
                        continue
                    number = self._pairs[key] = len(self._pairs)
                found.add(number)
        return sorted(found)


def _value(value: Any) -> Value:
    kind = _KINDS[type(value)]
    # 2 and 2.0 are one JSON number; so large an integer that no float holds it stays what it is.
    return (kind, int(value) if kind == "number" and value == value // 1 else value)
