from __future__ import annotations

import pytest
import torch

from examples.movielens.baselines import NEIGHBOUR_RECENCY, neighbour_scores
from examples.movielens.data import Split
from examples.movielens.evaluate import beam_search, prompts
from examples.movielens.model import Recipe
from examples.movielens.semantic_ids import SidOptions
from examples.movielens.tokens import SidTokens
from examples.movielens.train import Teacher, train, training_windows

RECIPE = Recipe(
    sids=SidOptions(codebook_sizes=(4, 3)),
    hidden_size=32,
    intermediate_size=32,
    layer_types=("linear_attention", "full_attention"),
    window=8,
    epochs=12,
    dropout=0.0,
    jitter=0.0,
    reverse=0.0,
    teacher_weight=0.0,
    ema=0.9,
)
# Films 0..11 in a circle: the next film is always the following one.
CODES = torch.tensor([[film % 4, film // 4] for film in range(12)])
CIRCLE = Split(12, [[(start + i) % 12 for i in range(20)] for start in range(60)], torch.zeros(60))


def test_windows_cover_every_film_once():
    generator = torch.Generator().manual_seed(0)
    history = list(range(100, 130))
    for _ in range(5):
        windows = training_windows([history], RECIPE, generator)
        assert all(2 <= len(window) <= 8 for window in windows)
        together = torch.cat(windows).tolist()
        # A piece of one film has nothing to predict from and is left out.
        assert set(together) <= set(history)
        assert len(together) == len(set(together)) >= len(history) - 2
        assert together == sorted(together)


def test_windows_jitter_and_reverse():
    generator = torch.Generator().manual_seed(0)
    backwards = training_windows([list(range(8))], Recipe(window=8, jitter=0.0, reverse=1.0), generator)
    assert backwards[0].tolist() == list(range(8))[::-1]
    moved = training_windows([list(range(50))], Recipe(window=50, jitter=3.0, reverse=0.0), generator)[0]
    assert sorted(moved.tolist()) == list(range(50)) != moved.tolist()
    assert (moved - torch.arange(50)).abs().max() < 20


def test_teacher_speaks_of_unseen_neighbours():
    tokens = SidTokens(CODES, (4, 3))
    teacher = Teacher(CIRCLE, tokens, power=2.0)
    films = torch.tensor([[0, 1, 5, 6]])
    first, second = teacher.targets(films)
    scores = neighbour_scores(CIRCLE.histories, 12)
    expected = (NEIGHBOUR_RECENCY * scores[0] + scores[1]) ** 2
    expected[[0, 1]] = 0
    by_level = torch.stack([expected[CODES[:, 0] == code].sum() for code in range(4)])
    torch.testing.assert_close(first[0, 1], by_level / by_level.sum())
    same_prefix = expected * (CODES[:, 0] == CODES[5, 0])
    by_code = torch.stack([same_prefix[CODES[:, 1] == code].sum() for code in range(3)])
    torch.testing.assert_close(second[0, 1], by_code / by_code.sum())


@pytest.mark.parametrize("teacher_weight", [0.0, 0.5])
def test_training_learns_a_circle(teacher_weight):
    recipe = Recipe(**{**RECIPE.__dict__, "teacher_weight": teacher_weight, "teacher_power": 6.0})
    tokens = SidTokens(CODES, (4, 3))
    centroids = [torch.eye(4, 4), torch.eye(3, 4)]
    model = train(CIRCLE, recipe, tokens, centroids)
    asked = prompts([[(start + i) % 12 for i in range(4)] for start in range(12)], tokens, recipe.window)
    found, _ = beam_search(model, asked, tokens, beam_width=4)
    hits = found[:, 0] == (torch.arange(12) + 4) % 12
    assert hits.sum() >= 11
