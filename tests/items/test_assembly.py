"""The arrays of a catalogue, looked at directly."""

from __future__ import annotations

import numpy as np
import pytest

from onela.errors import CatalogError, ConfigError
from onela.items.assembly import assemble
from onela.items.columns import CatalogColumns, IdColumn, StringColumn, id_column


def columns(ids: list, sids: list, weights: list | None = None) -> CatalogColumns:
    return CatalogColumns(
        IdColumn(id_column(ids)),
        np.array(sids, dtype=np.int32),
        weights=None if weights is None else np.array(weights, dtype=np.float64),
        lines=np.arange(len(ids)) * 10 + 5,
        source="file",
    )


def test_arrays() -> None:
    parts = assemble(columns([50, 40, 30, 20, 10], [[2, 0], [0, 1], [2, 0], [0, 1], [1, 1]], [0, 1, 9, 1, 0]))
    assert [parts.columns.ids[row] for row in range(5)] == [20, 40, 10, 30, 50]
    assert parts.item_offsets.tolist() == [0, 2, 3, 5]
    assert parts.id_keys.tolist() == [10, 20, 30, 40, 50]
    assert parts.id_rows.tolist() == [2, 0, 3, 1, 4]
    assert parts.trie.codebook_sizes == (3, 2)
    assert parts.trie.sids([0, 1, 2]).tolist() == [[0, 1], [1, 1], [2, 0]]
    assert parts.columns.weights is not None
    assert parts.columns.weights.tolist() == [1, 1, 0, 9, 0]


def test_keys_of_two_words() -> None:
    """Codebooks too wide for one packed key take the other way to sort; the result must not show it."""
    sids = np.random.default_rng(0).integers(0, 3, (500, 4)) * (2**22)
    parts = assemble(columns(list(range(500)), sids.tolist()))
    order = sorted(range(500), key=lambda row: (*sids[row].tolist(), row))
    assert parts.columns.ids.values.tolist() == order  # type: ignore[union-attr]
    assert np.array_equal(parts.trie.sids(np.arange(parts.trie.num_sids)), np.unique(sids, axis=0))


def test_version_tells_neighbours_apart() -> None:
    """Text that reads the same when run together, and a missing title next to an empty one."""
    base = columns(["ab", "c"], [[0], [0]])
    other = columns(["a", "bc"], [[0], [0]])
    titled = [StringColumn.from_strings(titles) for titles in ([None, ""], ["", None], ["", ""])]
    versions = {assemble(base).version, assemble(other).version}
    for titles in titled:
        versions.add(assemble(CatalogColumns(base.ids, base.sids, titles)).version)
        versions.add(assemble(CatalogColumns(base.ids, base.sids, None, titles)).version)
    assert len(versions) == 8
    assert assemble(columns([1, 2], [[0], [0]])).version != assemble(columns(["1", "2"], [[0], [0]])).version


def test_first_duplicate_line_wins() -> None:
    with pytest.raises(CatalogError, match="file, line 35: item_id 7 is there already, on line 5"):
        assemble(columns([7, 8, 9, 7, 8, 8], [[0]] * 6))
    with pytest.raises(ConfigError, match="duplicates"):
        assemble(columns([7], [[0]]), "keep")
