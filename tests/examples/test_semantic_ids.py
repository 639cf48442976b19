from __future__ import annotations

import pytest
import torch

from examples.movielens.data import split
from examples.movielens.semantic_ids import SidOptions, build_semantic_ids, kmeans, load_codes, save_codes


def test_kmeans_finds_separate_clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10]], dtype=torch.float64)
    points = centres.repeat_interleave(20, 0) + 0.1 * torch.randn(
        60, 2, dtype=torch.float64, generator=generator
    )
    found = kmeans(points, torch.ones(60, dtype=torch.float64), 3, 10, generator)
    assert torch.cdist(centres, found).min(1).values.max() < 0.1


def test_heavy_points_draw_the_centroid():
    points = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    weights = torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert kmeans(points, weights, 1, 5, torch.Generator().manual_seed(0)).item() == pytest.approx(0.25)


def test_every_film_has_its_own_codes(movielens):
    histories = split(movielens).histories
    options = SidOptions(iterations=5)
    codes, centroids = build_semantic_ids(movielens, histories, options)
    assert codes.shape == (1682, 3)
    assert len(set(map(tuple, codes.tolist()))) == 1682
    assert (codes >= 0).all()
    assert (codes < torch.tensor(options.codebook_sizes)).all()
    assert [len(level) for level in centroids] == list(options.codebook_sizes)
    again, _ = build_semantic_ids(movielens, histories, options)
    assert torch.equal(codes, again)


def test_too_few_codes_for_the_catalogue(movielens):
    with pytest.raises(ValueError, match="more films than the last level has codes"):
        build_semantic_ids(
            movielens, split(movielens).histories, SidOptions(codebook_sizes=(4, 4, 4), iterations=1)
        )


def test_held_out_films_do_not_reach_the_codes(movielens):
    """Codes depend on the training events alone: another future, the same codes."""
    options = SidOptions(iterations=2)
    histories = split(movielens, "valid").histories
    changed = type(movielens)(
        movielens.item_ids,
        movielens.titles,
        movielens.genres,
        movielens.years,
        movielens.user_ids,
        [films[:-2] + films[:-3:-1] for films in movielens.events],
    )
    expected, _ = build_semantic_ids(movielens, histories, options)
    codes, _ = build_semantic_ids(changed, split(changed, "valid").histories, options)
    assert torch.equal(codes, expected)


def test_codes_survive_the_file(tmp_path):
    codes = torch.tensor([[1, 2], [3, 4], [0, 0]])
    save_codes(tmp_path / "sids.json", ["a", "b", "c"], codes)
    assert torch.equal(load_codes(tmp_path / "sids.json", ["c", "a"]), codes[[2, 0]])
