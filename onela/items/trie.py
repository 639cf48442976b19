"""The legal semantic IDs as a trie in compressed sparse rows, one pair of arrays per level.

A node of level `l` (after `l` codes) is the number of the edge leading to it; the root is node 0 of level 0.

    children of node n:  codes[l][offsets[l][n] : offsets[l][n + 1]], ascending
    the child itself:    that very position, a node of level l + 1

So no child pointers are stored, and a leaf is the index of its SID among all distinct SIDs in sorted order.
Codes here are indices into the level's code order (see `vocabulary.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onela.errors import CatalogError

if TYPE_CHECKING:
    import torch

    from onela.items.device_trie import DeviceTrie

FORMAT_VERSION = 1
_WORD_BITS = 63  # a packed key must stay a non-negative int64


@dataclass(frozen=True, eq=False, repr=False)
class ItemTrie:
    """All legal SIDs. Build with `from_sids`; the arrays are shared, never write into them.

    Attributes:
        codebook_sizes: number of codes of each level, used by items or not.
        offsets: per level, [num_nodes(level) + 1] int32 (int64 from 2**31 edges on).
        codes: per level, [num_nodes(level + 1)] int32, ascending within a node.
        max_children: per level, the largest number of children that any node has.
    """

    codebook_sizes: tuple[int, ...]
    offsets: tuple[np.ndarray, ...]
    codes: tuple[np.ndarray, ...]
    max_children: tuple[int, ...]

    @classmethod
    def from_sids(cls, sids: Any, codebook_sizes: Sequence[int]) -> ItemTrie:
        """Build from SIDs in any order, repeats allowed.

        Args:
            sids: [M, num_levels] integers, code indices.
            codebook_sizes: number of codes of each level.
        Raises:
            CatalogError: no SID, wrong depth or dtype, or a code out of range (`line` is the 1-based row).
        """
        words = pack_sids(check_sids(sids, codebook_sizes), codebook_sizes)
        if len(words) == 1:
            words[0].sort()
        else:
            order = sorted_order(words)
            words = [word[order] for word in words]
        return cls.from_sorted_words(words, codebook_sizes)

    @classmethod
    def from_sorted_words(cls, words: list[np.ndarray], codebook_sizes: Sequence[int]) -> ItemTrie:
        """Build from keys of `pack_sids` that are already in order, repeats allowed."""
        sizes = tuple(int(size) for size in codebook_sizes)
        num_rows = len(words[0])
        changed = np.zeros(num_rows, dtype=bool)
        changed[0] = True
        parents = np.zeros(1, dtype=np.int64)  # first row below each node of the level above
        index_dtype = np.int32 if num_rows < 2**31 - 1 else np.int64
        offsets, codes, max_children = [], [], []
        for word, shift, bits in _layout(sizes):
            column = ((words[word] >> shift) & ((1 << bits) - 1)).astype(np.int32)
            changed[1:] |= column[1:] != column[:-1]
            edge_rows = np.flatnonzero(changed)
            rank = np.cumsum(changed, dtype=index_dtype)
            level_offsets = np.empty(len(parents) + 1, dtype=index_dtype)
            np.subtract(rank[parents], 1, out=level_offsets[:-1])
            level_offsets[-1] = len(edge_rows)
            offsets.append(level_offsets)
            codes.append(column[edge_rows])
            max_children.append(int(np.diff(level_offsets).max()))
            parents = edge_rows
        return cls(sizes, tuple(offsets), tuple(codes), tuple(max_children))

    @property
    def num_levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def num_sids(self) -> int:
        """Number of distinct SIDs, which is the number of leaves."""
        return len(self.codes[-1])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.offsets, *self.codes))

    def num_nodes(self, level: int) -> int:
        """Nodes after `level` codes: 1 for level 0 (the root), `num_sids` for level `num_levels`."""
        return 1 if level == 0 else len(self.codes[level - 1])

    def children(self, level: int, node: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes below one node, ascending int32, and the nodes of the next level that they lead to."""
        start, stop = int(self.offsets[level][node]), int(self.offsets[level][node + 1])
        return self.codes[level][start:stop], np.arange(start, stop)

    def find(self, sids: Any) -> np.ndarray:
        """Leaves of SIDs, [M, num_levels] integers to [M] int64; -1 where the SID is not in the trie."""
        array = np.asarray(sids)
        if array.ndim != 2 or array.shape[1] != self.num_levels or array.dtype.kind not in "iu":
            given = f"{array.dtype} {list(array.shape)}"
            raise CatalogError(f"sids: expected integers of shape [M, {self.num_levels}], got {given}")
        nodes = np.zeros(len(array), dtype=np.int64)
        for level in range(self.num_levels):
            nodes = self._advance(level, nodes, array[:, level])
        return nodes

    def _advance(self, level: int, nodes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Binary search in all rows' stretches at once; the loop runs over the bits of the widest node."""
        offsets, codes = self.offsets[level], self.codes[level]
        alive = nodes >= 0
        parent = np.where(alive, nodes, 0)
        low, stop = offsets[parent].astype(np.int64), offsets[parent + 1].astype(np.int64)
        high = stop.copy()
        for _ in range(self.max_children[level].bit_length()):
            middle = (low + high) >> 1
            go_right = (low < high) & (codes[np.minimum(middle, len(codes) - 1)] < wanted)
            low, high = (
                np.where(go_right, middle + 1, low),
                np.where(go_right, high, np.minimum(middle, high)),
            )
        found = alive & (low < stop) & (codes[np.minimum(low, len(codes) - 1)] == wanted)
        return np.where(found, low, -1)

    def sids(self, leaves: Any) -> np.ndarray:
        """Code indices of leaves, [M] to [M, num_levels] int32.

        Raises:
            CatalogError: a leaf out of range.
        """
        nodes = np.asarray(leaves, dtype=np.int64)
        if nodes.size and (int(nodes.min()) < 0 or int(nodes.max()) >= self.num_sids):
            raise CatalogError(f"sid_index: out of range 0..{self.num_sids - 1}")
        result = np.empty((*nodes.shape, self.num_levels), dtype=np.int32)
        for level in reversed(range(self.num_levels)):
            result[..., level] = self.codes[level][nodes]
            nodes = np.searchsorted(self.offsets[level], nodes, side="right") - 1
        return result

    def with_codes(self, mappings: Sequence[np.ndarray | None], codebook_sizes: Sequence[int]) -> ItemTrie:
        """The same trie, its codes renumbered per level by `mappings[level][code]`; None keeps a level.

        A mapping must keep the order of codes, so that nodes, leaves and offsets stay as they are.
        """
        codes = tuple(
            old if mapping is None else mapping[old].astype(np.int32)
            for old, mapping in zip(self.codes, mappings)
        )
        return ItemTrie(tuple(codebook_sizes), self.offsets, codes, self.max_children)

    def to(self, device: torch.device | str) -> DeviceTrie:
        """The trie as torch tensors; on the CPU they share memory with this one."""
        from onela.items.device_trie import DeviceTrie

        return DeviceTrie.from_trie(self, device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays and `trie.json` into a directory, which is made if need be."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for level in range(self.num_levels):
            np.save(folder / f"trie_offsets_{level}.npy", self.offsets[level])
            np.save(folder / f"trie_codes_{level}.npy", self.codes[level])
        header = {
            "format": FORMAT_VERSION,
            "codebook_sizes": list(self.codebook_sizes),
            "num_nodes": [self.num_nodes(level) for level in range(self.num_levels + 1)],
            "max_children": list(self.max_children),
        }
        (folder / "trie.json").write_text(json.dumps(header))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ItemTrie:
        """Memory-map a trie that `save` wrote.

        Raises:
            CatalogError: no such directory, another format version, or arrays that do not fit the header.
        """
        folder = Path(path)
        header = read_header(
            folder / "trie.json", ("codebook_sizes", "num_nodes", "max_children"), FORMAT_VERSION
        )
        sizes, num_nodes = header["codebook_sizes"], header["num_nodes"]
        offsets, codes = [], []
        for level in range(len(sizes)):
            offsets.append(load_array(folder / f"trie_offsets_{level}.npy", (num_nodes[level] + 1,), "i"))
            codes.append(load_array(folder / f"trie_codes_{level}.npy", (num_nodes[level + 1],), "i"))
            if int(offsets[level][0]) != 0 or int(offsets[level][-1]) != num_nodes[level + 1]:
                raise CatalogError(f"offsets of level {level} do not span its codes", path=str(folder))
        return cls(tuple(sizes), tuple(offsets), tuple(codes), tuple(header["max_children"]))

    def __repr__(self) -> str:
        return f"ItemTrie(num_sids={self.num_sids}, codebook_sizes={self.codebook_sizes})"


def check_sids(sids: Any, codebook_sizes: Sequence[int]) -> np.ndarray:
    """The SIDs as an array, once they are known to be non-empty, of the right depth and in range."""
    array = np.asarray(sids)
    num_levels = len(codebook_sizes)
    if array.ndim != 2 or array.shape[1] != num_levels or num_levels == 0:
        raise CatalogError(f"sids: shape {list(array.shape)}, expected [M, {num_levels}]")
    if len(array) == 0:
        raise CatalogError("sids: no item")
    if array.dtype.kind not in "iu":
        raise CatalogError(f"sids: dtype {array.dtype}, expected integers")
    for level, size in enumerate(codebook_sizes):
        column = array[:, level]
        if int(column.min()) < 0 or int(column.max()) >= size:
            row = int(np.flatnonzero((column < 0) | (column >= size))[0])
            raise CatalogError(
                f"row {row + 1}, level {level}: code {int(column[row])} is out of range 0..{int(size) - 1}",
                line=row + 1,
            )
    return array


def pack_sids(sids: np.ndarray, codebook_sizes: Sequence[int]) -> list[np.ndarray]:
    """SIDs as sortable int64 keys: as many levels per key as fit 63 bits, the most significant key first."""
    layout = _layout(codebook_sizes)
    words = [np.zeros(len(sids), dtype=np.int64) for _ in range(layout[-1][0] + 1)]
    for level, (word, _, bits) in enumerate(layout):
        np.left_shift(words[word], bits, out=words[word])
        np.bitwise_or(words[word], sids[:, level].astype(np.int64, copy=False), out=words[word])
    return words


def sorted_order(words: list[np.ndarray]) -> np.ndarray:
    """The order that sorts packed keys; equal keys come in no particular order."""
    return np.argsort(words[0]) if len(words) == 1 else np.lexsort(words[::-1])


def _layout(codebook_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(word, shift, bits) of every level."""
    all_bits = [max(1, (int(size) - 1).bit_length()) for size in codebook_sizes]
    words: list[list[int]] = [[]]
    for bits in all_bits:
        if sum(words[-1]) + bits > _WORD_BITS:
            words.append([])
        words[-1].append(bits)
    return [
        (word, sum(members[place + 1 :]), bits)
        for word, members in enumerate(words)
        for place, bits in enumerate(members)
    ]


def read_header(path: Path, keys: Sequence[str], version: int) -> dict[str, Any]:
    """A JSON header of a saved directory, once its version and keys are known to be right."""
    try:
        header = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CatalogError(f"cannot be read: {error}", path=str(path)) from error
    if not isinstance(header, dict) or header.get("format") != version:
        found = header.get("format") if isinstance(header, dict) else None
        raise CatalogError(f"format {found!r}, this version reads format {version}", path=str(path))
    missing = [key for key in keys if key not in header]
    if missing:
        raise CatalogError(f"field {missing[0]!r} is missing", path=str(path))
    return header


def load_array(path: Path, shape: tuple[int, ...], kinds: str) -> np.ndarray:
    """Memory-map one array. Copy-on-write: torch takes it without a warning, the file can never change."""
    try:
        mapped = np.load(path, mmap_mode="c" if all(shape) else None, allow_pickle=False)
    except Exception as error:  # NumPy reads the header as Python, and a damaged one raises what that raises
        raise CatalogError(f"cannot be read: {error}", path=str(path)) from error
    # The same memory; indexing a `np.memmap` takes ten times as long.
    array: np.ndarray = mapped.view(np.ndarray)
    if array.shape != shape or array.dtype.kind not in kinds:
        raise CatalogError(
            f"holds {array.dtype} {list(array.shape)}, the header says {list(shape)}", path=str(path)
        )
    return array
