"""A catalogue on disk: replaced whole, mapped safely, refused when damaged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from onela.errors import CatalogError
from onela.items import CatalogItem, ItemCatalog, SidVocabulary
from onela.items.attributes import AttributeIndex

ITEMS = [
    CatalogItem("x", (1, 2), "X", {"k": 1}, 2.0),
    CatalogItem("y", (1, 2), None, None, 3.0),
    CatalogItem("z", (0, 2)),
]


def test_saving_over_a_mapped_catalogue(tmp_path: Path) -> None:
    """A server has the old catalogue mapped; the new one takes its place and neither sees the other."""
    path = tmp_path / "catalog"
    ItemCatalog.from_items(ITEMS).save(path)
    served = ItemCatalog.load(path)
    ItemCatalog.from_items(ITEMS[:1]).save(path)
    assert [record.item_id for record in served.records()] == ["z", "y", "x"]
    assert served.title(2) == "X"
    assert [record.item_id for record in ItemCatalog.load(path).records()] == ["x"]
    assert [file.name for file in tmp_path.iterdir()] == ["catalog"]


def test_only_a_catalogue_is_replaced(tmp_path: Path) -> None:
    catalog = ItemCatalog.from_items(ITEMS)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(CatalogError, match="is there already and is no catalogue"):
            catalog.save(tmp_path / name)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    catalog.save(tmp_path / "empty")
    catalog.save(tmp_path / "deep" / "er")
    assert ItemCatalog.load(tmp_path / "empty").version == ItemCatalog.load(tmp_path / "deep" / "er").version


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "catalog"
    old = ItemCatalog.from_items(ITEMS)
    old.save(path)

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", broken)
    with pytest.raises(CatalogError, match="cannot be written: disk full"):
        ItemCatalog.from_items(ITEMS[:1]).save(path)
    assert ItemCatalog.load(path).version == old.version
    assert [file.name for file in tmp_path.iterdir()] == ["catalog"]


def test_a_save_that_fails_at_its_last_move_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "catalog"
    old = ItemCatalog.from_items(ITEMS)
    old.save(path)
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no right to")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(CatalogError, match="cannot be written: no right to"):
        ItemCatalog.from_items(ITEMS[:1]).save(path)
    assert ItemCatalog.load(path).version == old.version
    assert [file.name for file in tmp_path.iterdir()] == ["catalog"]


def test_texts_of_no_length(tmp_path: Path) -> None:
    """An empty buffer cannot be mapped."""
    ItemCatalog.from_items([CatalogItem("", (0,), "")]).save(tmp_path / "c")
    loaded = ItemCatalog.load(tmp_path / "c")
    assert (loaded.item_id(0), loaded.title(0), loaded.find("")) == ("", "", 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ids_data.npy", np.zeros(2, dtype=np.uint8), r"ids_data\.npy: holds uint8 \[2\]"),
        ("item_offsets.npy", np.array([0, 1, 2], dtype=np.int32), "item_offsets do not span the items"),
        ("weights.npy", np.zeros(3, dtype=np.int64), r"weights\.npy: holds int64"),
        ("id_keys.npy", np.zeros(1, dtype=np.uint64), r"id_keys\.npy: holds uint64 \[1\]"),
        ("id_rows.npy", None, r"id_rows\.npy: cannot be read"),
        ("trie.json", None, r"trie\.json: cannot be read"),
        ("catalog.json", {"format": 2}, "format 2, this version reads format 1"),
        ("catalog.json", {"version": None}, "field 'version' is missing"),
        ("catalog.json", {"texts": {}}, "field 'texts' lacks the item ids"),
        ("catalog.json", {"texts": 5}, "a header is damaged"),
        ("catalog.json", {"version": 5}, "field 'version' is no text"),
        ("trie.json", {"num_nodes": [1]}, "a header is damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: np.ndarray | dict | None, message: str) -> None:
    path = tmp_path / "c"
    ItemCatalog.from_items(ITEMS).save(path)
    if isinstance(content, np.ndarray):
        np.save(path / name, content)
    elif content is None:
        (path / name).unlink()
    else:
        header = {**json.loads((path / name).read_text()), **content}
        (path / name).write_text(
            json.dumps({key: value for key, value in header.items() if value is not None})
        )
    with pytest.raises(CatalogError, match=message):
        ItemCatalog.load(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trie_offsets_1.npy", np.array([0, 9, 2], dtype=np.int32)),
        ("trie_offsets_1.npy", np.array([0, 0, 2], dtype=np.int32)),
        ("trie_codes_0.npy", np.array([0, 9], dtype=np.int32)),
        ("trie_codes_0.npy", np.array([-1, 1], dtype=np.int32)),
        ("trie_codes_0.npy", np.array([1, 0], dtype=np.int32)),
        ("item_offsets.npy", np.array([0, 4, 3], dtype=np.int32)),
        ("id_rows.npy", np.array([0, 1, 3], dtype=np.int32)),
        ("id_keys.npy", np.array([2, 1, 3], dtype=np.uint64)),
        ("ids_offsets.npy", np.array([0, 2, 1, 3], dtype=np.int64)),
        ("trie.json", {"max_children": [1, 1]}),
    ],
)
def test_what_leads_nowhere_is_refused_before_it_is_served(
    tmp_path: Path, name: str, content: np.ndarray | dict
) -> None:
    path = tmp_path / "c"
    vocabulary = SidVocabulary.from_token_ids([[5, 6], [7, 8, 9]])
    ItemCatalog.from_items(ITEMS).save(path)
    assert ItemCatalog.load(path, vocabulary).num_items == 3
    if isinstance(content, np.ndarray):
        assert content.shape == np.load(path / name).shape
        np.save(path / name, content)
    else:
        (path / name).write_text(json.dumps({**json.loads((path / name).read_text()), **content}))
    with pytest.raises(CatalogError, match=rf"c: {re.escape(name)} is damaged; save the catalogue again"):
        ItemCatalog.load(path, vocabulary)


def test_content_that_is_not_its_versions_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    ItemCatalog.from_items(ITEMS).save(path)
    ItemCatalog.load(path).verify()
    damaged = 0
    for file in sorted(path.glob("*.npy")):
        kept = file.read_bytes()
        file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(CatalogError, match=f"^{re.escape(str(path))}"):
            ItemCatalog.load(path).verify()
        file.write_bytes(kept)
        damaged += 1
    assert damaged >= 8
    ItemCatalog.load(path).verify()
    header = json.loads((path / "catalog.json").read_text())
    (path / "catalog.json").write_text(json.dumps({**header, "version": "0123456789abcdef"}))
    with pytest.raises(
        CatalogError,
        match=f"c: is damaged: its content has the version {header['version']}, not 0123456789abcdef",
    ):
        ItemCatalog.load(path).verify()


def test_metadata_that_is_no_json_is_a_catalogues_fault(tmp_path: Path) -> None:
    ItemCatalog.from_items(ITEMS).save(tmp_path / "c")
    np.save(tmp_path / "c" / "metadata_data.npy", np.frombuffer(b'{"k":x}', dtype=np.uint8))
    with pytest.raises(CatalogError, match=r"c: metadata b'{\"k\":x}' is not JSON"):
        AttributeIndex(ItemCatalog.load(tmp_path / "c"))


def test_a_moved_catalogue_loads(tmp_path: Path) -> None:
    ItemCatalog.from_items(ITEMS).save(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert ItemCatalog.load(tmp_path / "b", format="onela").num_items == 3
    with pytest.raises(CatalogError, match=r"catalog\.json: cannot be read"):
        ItemCatalog.load(tmp_path / "a", format="onela")
