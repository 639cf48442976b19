"""Which items a request may get: filters and lists of ids, compiled to the nodes of the trie that still lead somewhere.

A *base* is what many requests share: all items, or those that match an attribute filter. It is pushed up the trie once
and kept. What one request excludes is then a few thousand nodes at most: the leaves that lose their last item, and of
their ancestors those that lose their last child, found by counting, without touching the rest of the trie.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onela.errors import RequestError
from onela.items.attributes import AttributeIndex, Filter, not_a_filter
from onela.items.catalog import ItemCatalog
from onela.items.lookup import Stretches

MAX_BASES = 16
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class EligibleBase:
    """Nodes that lead to an item of a set of items.

    Attributes:
        items: [num_items] bool; None: all of them.
        words: [num_words] uint32, one bit per node of levels 1 to `num_levels`, each level from a word of its own.
        num_children: per level, eligible children of each node, int32; None: all of them.
        num_nodes: eligible nodes of levels 1 to `num_levels`.
    """

    items: np.ndarray | None
    words: np.ndarray
    num_children: tuple[np.ndarray, ...] | None
    num_nodes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Eligibility:
    """What one request may get: a base, changed in a few words.

    Attributes:
        base: what it starts from; None: from nothing.
        places, words: [M] int64 and [M] uint32: which words are not the base's, ascending, and what they are instead;
            without a base all others are 0.
        num_nodes: eligible nodes of levels 1 to `num_levels`.
        excluded: items taken from the base, ascending. allowed: all there are, without a base, ascending.
    """

    base: EligibleBase | None
    places: np.ndarray
    words: np.ndarray
    num_nodes: tuple[int, ...]
    excluded: np.ndarray
    allowed: np.ndarray

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return self.num_nodes[-1] == 0

    def kept(self, items: np.ndarray) -> np.ndarray:
        """Which of `items`, [M] integers, are eligible, [M] bool: some items of an eligible SID may not be."""
        if self.base is None:
            return _contains(self.allowed, items)
        kept = ~_contains(self.excluded, items)
        if self.base.items is not None:
            kept &= self.base.items[items]
        return kept


class EligibilityIndex:
    """Compiles the filters of requests over one catalogue. May be used from several threads.

    Args:
        catalog: the items.
        max_bases: how many attribute filters are kept compiled, the latest used ones.

    Attributes:
        level_words: first word of each level 1 to `num_levels`, and the number of words after them.
    """

    def __init__(self, catalog: ItemCatalog, *, max_bases: int = MAX_BASES) -> None:
        self.catalog = catalog
        trie = catalog.trie
        self.num_levels = trie.num_levels
        words = [-(-trie.num_nodes(level) // 32) for level in range(1, self.num_levels + 1)]
        self.level_words = (0, *np.cumsum(words).tolist())
        # Whose an item is, and whose a node: before the first request, for it takes a while.
        self._leaves = Stretches(catalog.item_offsets)
        self._parents = tuple(Stretches(offsets) for offsets in trie.offsets[1:])
        self.max_bases = max_bases
        self._bases: OrderedDict[Filter, EligibleBase] = OrderedDict()
        self._attributes: AttributeIndex | None = None
        self._everything: EligibleBase | None = None
        self._lock = threading.Lock()

    @property
    def attributes(self) -> AttributeIndex:
        """The metadata by value; read when it is first needed, which takes a while for a large catalogue."""
        with self._lock:
            if self._attributes is None:
                self._attributes = AttributeIndex(self.catalog)
            return self._attributes

    def compile(
        self,
        *,
        exclude_item_ids: Sequence[int | str] | None = None,
        allow_item_ids: Sequence[int | str] | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Eligibility | None:
        """Work out what a request may get; None: everything.

        Args:
            exclude_item_ids: never these. Ids that the catalogue does not have are passed over.
            allow_item_ids: none but these. None: no such limit; an empty list: nothing at all.
            filter: attribute -> value or list of values; an item must have one of the values of every attribute.
        Raises:
            RequestError: names the field and what is wrong with it.
        """
        # Of another kind, what is as good as empty must not pass for no filter.
        if not isinstance(filter, (Mapping, type(None))):
            raise not_a_filter(filter)
        exclude = [] if exclude_item_ids is None else _listed("exclude_item_ids", exclude_item_ids)
        if not exclude and allow_item_ids is None and not filter:
            return None
        parsed = self.attributes.parse(filter) if filter else ()
        base = self._base(parsed)
        excluded = self._items("exclude_item_ids", exclude)
        if allow_item_ids is not None:
            allow = _listed("allow_item_ids", allow_item_ids)
            allowed = np.setdiff1d(self._items("allow_item_ids", allow), excluded, assume_unique=True)
            return self._only(allowed if base.items is None else allowed[base.items[allowed]])
        return self._without(base, excluded if base.items is None else excluded[base.items[excluded]])

    def _items(self, field: str, item_ids: list[Any]) -> np.ndarray:
        """Distinct items of ids, ascending."""
        items = self.catalog.find_many(item_ids)
        items.sort()
        if len(items) and items[0] < 0:  # is it none of the catalogue's, of another type, or no id at all?
            kind: type = str if self.catalog.id_kind == "str" else int
            if not set(map(type, item_ids)) <= {kind}:
                items = self.catalog.find_many([_plain(field, item_id, kind) for item_id in item_ids])
                items.sort()
            items = items[items >= 0]
        return _runs(items)[0]

    def _base(self, filter: Filter) -> EligibleBase:
        with self._lock:
            if not filter:
                if self._everything is None:
                    self._everything = self._all_items()
                return self._everything
            if filter in self._bases:
                self._bases.move_to_end(filter)
                return self._bases[filter]
        base = self._push_up(self.attributes.matching(filter))
        with self._lock:
            self._bases[filter] = base
            while len(self._bases) > self.max_bases:
                self._bases.popitem(last=False)
        return base

    def _all_items(self) -> EligibleBase:
        trie = self.catalog.trie
        num_nodes = tuple(trie.num_nodes(level) for level in range(1, self.num_levels + 1))
        words = np.concatenate([_pack(np.ones(count, dtype=bool)) for count in num_nodes])
        return EligibleBase(None, words, None, num_nodes)

    def _push_up(self, items: np.ndarray) -> EligibleBase:
        """From a mask of items to masks of nodes, level by level. Every node has a child, every leaf an item."""
        trie = self.catalog.trie
        nodes = np.logical_or.reduceat(items, self.catalog.item_offsets[:-1])
        words, counts, num_children = [_pack(nodes)], [int(nodes.sum())], []
        for level in reversed(range(self.num_levels)):
            children = np.add.reduceat(nodes, trie.offsets[level][:-1], dtype=np.int32)
            num_children.append(children)
            nodes = children > 0
            if level:
                words.append(_pack(nodes))
                counts.append(int(nodes.sum()))
        return EligibleBase(
            items, np.concatenate(words[::-1]), tuple(num_children[::-1]), tuple(counts[::-1])
        )

    def _without(self, base: EligibleBase, excluded: np.ndarray) -> Eligibility:
        """The base less some of its items. `excluded` is distinct and inside the base."""
        trie, offsets = self.catalog.trie, self.catalog.item_offsets
        leaves, lost = _runs(self._leaves.of(excluded))
        nodes = leaves[lost == _counts(offsets, base.items, leaves)]
        closed = [nodes]
        for level in reversed(range(1, self.num_levels)):
            parents, lost = _runs(self._parents[level - 1].of(nodes))
            if base.num_children is None:
                children = _counts(trie.offsets[level], None, parents)
            else:
                children = base.num_children[level].take(parents)
            nodes = parents[lost == children]
            closed.append(nodes)
        closed.reverse()
        num_nodes = tuple(count - len(nodes) for count, nodes in zip(base.num_nodes, closed))
        places, bits = self._bits(closed)
        words = base.words.take(places) & ~bits
        return Eligibility(base, places, words, num_nodes, excluded, np.zeros(0, dtype=np.int64))

    def _only(self, allowed: np.ndarray) -> Eligibility:
        """Some items and nothing else."""
        nodes = _runs(self._leaves.of(allowed))[0]
        opened = [nodes]
        for parents in reversed(self._parents):
            nodes = _runs(parents.of(nodes))[0]
            opened.append(nodes)
        opened.reverse()
        num_nodes = tuple(len(nodes) for nodes in opened)
        return Eligibility(None, *self._bits(opened), num_nodes, np.zeros(0, dtype=np.int64), allowed)

    def _bits(self, nodes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct nodes of every level as the words that they lie in, and their bits in them."""
        # From the first word's first bit on, one number says both.
        number = np.concatenate([32 * start + level for start, level in zip(self.level_words, nodes)])
        place, bit = number >> 5, _BITS.take(number & 31)
        if len(place) == 0:
            return place, bit
        # Nodes ascend level by level, and so do their words.
        first = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]]))
        return place[first], np.bitwise_or.reduceat(bit, first)


def _listed(field: str, item_ids: Any) -> list[Any]:
    """The ids that a field of a request holds. Raises `RequestError` for what is no list or the like."""
    if isinstance(item_ids, Collection) and not isinstance(item_ids, (str, bytes)):
        with contextlib.suppress(TypeError):  # an array of no dimension
            return list(item_ids)
    raise RequestError(field, "a list of item ids is expected", value=item_ids)


def _plain(field: str, item_id: Any, kind: type) -> int | str:
    """An id as Python's own string or integer: NumPy has strings that are `str` too, and integers that are not `int`.

    Raises:
        RequestError: it is neither.
    """
    if kind is str and isinstance(item_id, str):
        return str.__str__(item_id)  # not str(item_id): a member of an enumeration would give its name
    if kind is int and isinstance(item_id, (int, np.integer)) and not isinstance(item_id, bool):
        return int(item_id)
    raise RequestError(
        field, f"the catalogue's ids are {'strings' if kind is str else 'integers'}", value=item_id
    )


def _runs(ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of an ascending array, and how often each is there."""
    differs = np.ones(len(ascending) + 1, dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=differs[1:-1])
    bounds = np.flatnonzero(differs)
    return ascending[bounds[:-1]], bounds[1:] - bounds[:-1]


def _contains(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which values an ascending array has, [M] bool."""
    if len(ascending) == 0:
        return np.zeros(len(values), dtype=bool)
    return ascending.take(np.searchsorted(ascending, values), mode="clip") == values


def _counts(offsets: np.ndarray, mask: np.ndarray | None, owners: np.ndarray) -> np.ndarray:
    """How many members of each stretch the mask has, [M]."""
    starts = offsets.take(owners)
    sizes = offsets.take(owners + 1) - starts
    if mask is None or len(owners) == 0:
        return sizes
    before = np.cumsum(sizes) - sizes
    members = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
    return np.add.reduceat(mask[members], before, dtype=np.int64)


def _pack(mask: np.ndarray) -> np.ndarray:
    """[n] bool to [ceil(n / 32)] uint32, bit `i % 32` of word `i // 32`."""
    packed = np.packbits(mask, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view("<u4").astype(np.uint32, copy=False)
