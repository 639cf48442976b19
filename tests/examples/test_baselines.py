from __future__ import annotations

import pytest
import torch

from examples.movielens import baselines
from examples.movielens.data import Split, split
from examples.movielens.evaluate import recall_ndcg

TINY = Split(5, [[0, 1, 2], [0, 1, 3], [1, 2]], torch.tensor([3, 2, 4]))


def test_popularity_leaves_out_seen_films():
    # Audiences: 2, 3, 2, 1, 0.
    assert baselines.popularity(TINY, 2).tolist() == [[3, 4], [2, 4], [0, 3]]


def test_item_knn_is_the_cosine_of_audiences():
    watched = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 1, 1, 0, 0]])
    column = torch.nn.functional.normalize(watched, dim=0)
    similarity = column.T @ column
    similarity.fill_diagonal_(0)
    best = (watched @ similarity).masked_fill(watched.bool(), -1).argmax(1)
    assert baselines.item_knn(TINY, k=1)[:, 0].tolist() == best.tolist() == [3, 2, 0]


def test_transitions_count_distances():
    counts = baselines.transitions(TINY.histories, 5, window=2, decay=0.5)
    expected = torch.zeros(5, 5)
    expected[0, 1], expected[1, 2], expected[1, 3] = 2, 2, 1
    expected[0, 2] = expected[0, 3] = 0.5
    assert torch.equal(counts, expected)


def test_recency_weights_the_last_films():
    weights = baselines.recency(TINY.histories, 5, 0.5, 2)
    assert torch.equal(weights, torch.tensor([[0, 0.5, 1, 0, 0], [0, 0.5, 0, 1, 0], [0, 0.5, 1, 0, 0]]))


@pytest.mark.parametrize(
    ("rank", "recall", "ndcg"),
    [
        (baselines.popularity, 0.0859, 0.0449),
        (baselines.item_knn, 0.1092, 0.0563),
        (lambda test: baselines.item_knn(test, last=3), 0.1845, 0.0986),
        (baselines.markov, 0.1718, 0.0920),
        (baselines.cooccurrence, 0.2248, 0.1191),
    ],
    ids=["popularity", "item_knn", "item_knn_last_3", "markov", "cooccurrence"],
)
def test_real_figures(movielens, rank, recall, ndcg):
    test = split(movielens)
    ranked = rank(test)
    assert ranked.shape == (943, 10)
    for films, history in zip(ranked.tolist(), test.histories):
        assert len(set(films)) == 10
        assert not set(films) & set(history)
    assert recall_ndcg(ranked, test.targets) == pytest.approx((recall, ndcg), abs=2e-3)
