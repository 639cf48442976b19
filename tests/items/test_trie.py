"""ItemTrie and DeviceTrie against a trie of nested dictionaries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onela.errors import CatalogError
from onela.items.device_trie import DeviceTrie
from onela.items.trie import ItemTrie, pack_sids

WIDE = 2**30  # three such levels do not fit one 63-bit key


class DictTrie:
    """The witness: every prefix as a tuple, and the set of codes that may follow it."""

    def __init__(self, sids: list[tuple[int, ...]]) -> None:
        self.sids = sorted(set(sids))
        self.next: dict[tuple[int, ...], set[int]] = {}
        for sid in self.sids:
            for depth in range(len(sid)):
                self.next.setdefault(sid[:depth], set()).add(sid[depth])

    def allowed(self, prefix: tuple[int, ...]) -> list[int]:
        return sorted(self.next.get(prefix, ()))


@st.composite
def catalogues(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    """SIDs with repeats and shared prefixes, over codebooks small and too wide for one packed key."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 7, 8, 9, 200, WIDE]), min_size=1, max_size=7))
    # A small pool per level makes prefixes meet, which independent draws from a wide codebook never would.
    pools = [draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)) for size in sizes]
    sids = draw(st.lists(st.tuples(*map(st.sampled_from, pools)), min_size=1, max_size=40))
    return sids, sizes


def nodes_of(trie: ItemTrie, prefixes: list[tuple[int, ...]], level: int) -> list[int]:
    """Nodes of prefixes by walking the CSR arrays in plain Python."""
    nodes = []
    for prefix in prefixes:
        node = 0
        for depth in range(level):
            codes, children = trie.children(depth, node)
            node = int(children[codes.tolist().index(prefix[depth])])
        nodes.append(node)
    return nodes


@given(catalogues())
def test_arrays_are_the_dictionary_trie(case: tuple[list[tuple[int, ...]], list[int]]) -> None:
    sids, sizes = case
    trie, witness = ItemTrie.from_sids(sids, sizes), DictTrie(sids)
    assert trie.num_levels == len(sizes)
    assert trie.num_sids == len(witness.sids)
    for level in range(len(sizes)):
        prefixes = sorted({sid[:level] for sid in sids})
        assert trie.num_nodes(level) == len(prefixes) == len(trie.offsets[level]) - 1
        assert [trie.children(level, n)[0].tolist() for n in range(len(prefixes))] == [
            witness.allowed(prefix) for prefix in prefixes
        ]
        assert trie.max_children[level] == max(len(witness.allowed(prefix)) for prefix in prefixes)
        assert trie.codes[level].dtype == np.int32
    # A leaf is the place of its SID in sorted order, and both directions agree.
    assert trie.sids(np.arange(trie.num_sids)).tolist() == [list(sid) for sid in witness.sids]
    assert trie.find(np.array(sids)).tolist() == [witness.sids.index(sid) for sid in sids]


@given(catalogues(), st.data())
def test_find_absent_sids(case: tuple[list[tuple[int, ...]], list[int]], data: st.DataObject) -> None:
    sids, sizes = case
    trie, witness = ItemTrie.from_sids(sids, sizes), DictTrie(sids)
    asked = data.draw(st.lists(st.tuples(*(st.integers(-2, size + 1) for size in sizes)), min_size=1))
    mixed = [tuple(data.draw(st.sampled_from(sids))[level] for level in range(len(sizes))) for _ in range(5)]
    asked += mixed
    expected = [witness.sids.index(sid) if sid in witness.sids else -1 for sid in asked]
    assert trie.find(np.array(asked)).tolist() == expected


def test_pairs_are_not_paths() -> None:
    """A table that knows only pairs of neighbours would let (1, 2, 9) through."""
    trie = ItemTrie.from_sids([(1, 2, 3), (8, 2, 9)], [16] * 3)
    [node] = nodes_of(trie, [(1, 2)], 2)
    assert trie.children(2, node)[0].tolist() == [3]
    assert trie.find([[1, 2, 9], [8, 2, 9]]).tolist() == [-1, 1]


@pytest.mark.parametrize("sizes", [(300, 20, 300), (WIDE, 20, WIDE)], ids=["one key", "two keys"])
def test_two_hundred_thousand(sizes: tuple[int, ...]) -> None:
    """Both ways to sort against numpy's own `unique`."""
    rng = np.random.default_rng(0)
    sids = np.stack([rng.integers(0, 300 if size == WIDE else size, 200_000) for size in sizes], axis=1)
    assert len(pack_sids(sids[:1], sizes)) == (1 if sizes[0] == 300 else 2)
    trie = ItemTrie.from_sids(sids, sizes)
    distinct = np.unique(sids, axis=0)
    assert len(distinct) < len(sids)
    assert np.array_equal(trie.sids(np.arange(trie.num_sids)), distinct)
    assert np.array_equal(distinct[trie.find(sids)], sids)


def test_shared_memory_on_cpu() -> None:
    trie = ItemTrie.from_sids([(1, 2), (0, 1)], [2, 3])
    device = trie.to("cpu")
    assert [t.data_ptr() for t in device.codes] == [a.ctypes.data for a in trie.codes]
    assert [t.data_ptr() for t in device.offsets] == [a.ctypes.data for a in trie.offsets]
    assert device.device == torch.device("cpu")
    assert [device.num_nodes(level) for level in range(3)] == [1, 2, 2]
    assert trie.nbytes == sum(t.numel() * t.element_size() for t in (*device.codes, *device.offsets))


@settings(max_examples=20)
@given(catalogues())
def test_save_and_load(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[tuple[int, ...]], list[int]]
) -> None:
    trie = ItemTrie.from_sids(*case)
    path = tmp_path_factory.mktemp("trie") / "new" / "folder"
    trie.save(path)
    loaded = ItemTrie.load(path)
    assert (loaded.codebook_sizes, loaded.max_children) == (trie.codebook_sizes, trie.max_children)
    for ours, theirs in zip((*trie.offsets, *trie.codes), (*loaded.offsets, *loaded.codes)):
        assert isinstance(theirs.base, np.memmap)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert isinstance(
        loaded.to("cpu"), DeviceTrie
    )  # torch warns about read-only memory, and warnings are errors


def test_memory_map_never_writes_back(tmp_path: Path) -> None:
    ItemTrie.from_sids([(1, 2), (0, 1)], [2, 3]).save(tmp_path)
    ItemTrie.load(tmp_path).codes[0][:] = 7
    assert ItemTrie.load(tmp_path).codes[0].tolist() == [0, 1]


def test_damaged_files(tmp_path: Path) -> None:
    trie = ItemTrie.from_sids([(1, 2), (0, 1), (0, 2)], [2, 3])
    with pytest.raises(CatalogError, match="cannot be read"):
        ItemTrie.load(tmp_path / "absent")
    trie.save(tmp_path)
    np.save(tmp_path / "trie_codes_1.npy", np.zeros(2, dtype=np.int32))
    with pytest.raises(CatalogError, match=r"trie_codes_1.npy: holds int32 \[2\], the header says \[3\]"):
        ItemTrie.load(tmp_path)
    np.save(tmp_path / "trie_codes_1.npy", np.zeros(3, dtype=np.float32))
    with pytest.raises(CatalogError, match="holds float32"):
        ItemTrie.load(tmp_path)
    (tmp_path / "trie_codes_1.npy").write_bytes(b"not an array")
    with pytest.raises(CatalogError, match=r"trie_codes_1\.npy: cannot be read"):
        ItemTrie.load(tmp_path)
    trie.save(tmp_path)
    np.save(tmp_path / "trie_offsets_1.npy", np.array([0, 2, 2], dtype=np.int32))
    with pytest.raises(CatalogError, match="offsets of level 1 do not span"):
        ItemTrie.load(tmp_path)
    trie.save(tmp_path)
    header = json.loads((tmp_path / "trie.json").read_text())
    for change, message in [
        ({"format": 99}, "format 99"),
        ({"num_nodes": None}, "field 'num_nodes' is missing"),
    ]:
        changed = {key: value for key, value in {**header, **change}.items() if value is not None}
        (tmp_path / "trie.json").write_text(json.dumps(changed))
        with pytest.raises(CatalogError, match=message):
            ItemTrie.load(tmp_path)
    for text in ("[]", "{"):
        (tmp_path / "trie.json").write_text(text)
        with pytest.raises(CatalogError, match=r"trie\.json"):
            ItemTrie.load(tmp_path)


@pytest.mark.parametrize(
    ("sids", "sizes", "message"),
    [
        (np.zeros((0, 2), dtype=np.int32), [2, 2], "no item"),
        ([[1, 1]], [2, 2, 2], r"shape \[1, 2\], expected \[M, 3\]"),
        ([1, 1], [2, 2], r"shape \[2\]"),
        ([[0.0, 1.0]], [2, 2], "dtype float64"),
        ([[0, 0], [0, 2]], [2, 2], r"row 2, level 1: code 2 is out of range 0\.\.1"),
        ([[0, 0], [1, 0], [-1, 0]], [2, 2], r"row 3, level 0: code -1 is out of range 0\.\.1"),
        (np.zeros((1, 0), dtype=np.int32), [], "shape"),
    ],
)
def test_wrong_sids(sids: list, sizes: list[int], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        ItemTrie.from_sids(sids, sizes)


def test_wrong_arguments() -> None:
    trie = ItemTrie.from_sids([(1, 2), (0, 1)], [2, 3])
    with pytest.raises(CatalogError, match="sids: expected integers of shape"):
        trie.find([[1, 2, 3]])
    for leaf in (-1, 2):
        with pytest.raises(CatalogError, match=r"out of range 0\.\.1"):
            trie.sids([leaf])


def test_unsigned_sids() -> None:
    trie = ItemTrie.from_sids(np.array([[1, 2], [0, 1]], dtype=np.uint64), [2, 3])
    assert trie.sids([0, 1]).tolist() == [[0, 1], [1, 2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same() -> None:
    rng = np.random.default_rng(1)
    trie = ItemTrie.from_sids(rng.integers(0, 50, (20_000, 3)), [50, 50, 50])
    host, device = trie.to("cpu"), trie.to("cuda")
    for ours, theirs in zip((*host.offsets, *host.codes), (*device.offsets, *device.codes)):
        assert torch.equal(ours, theirs.cpu())
    assert [device.num_nodes(level) for level in range(4)] == [trie.num_nodes(level) for level in range(4)]
