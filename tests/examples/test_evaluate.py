from __future__ import annotations

import itertools
import math

import pytest
import torch

from examples.movielens.evaluate import beam_search, drop_seen, prompts, recall_ndcg
from examples.movielens.model import Recipe, new_model, use_reference_ops
from examples.movielens.semantic_ids import SidOptions
from examples.movielens.tokens import SidTokens

RECIPE = Recipe(sids=SidOptions(codebook_sizes=(3, 4, 2)), hidden_size=32, intermediate_size=32)


@pytest.fixture(scope="module")
def tokens() -> SidTokens:
    every = list(itertools.product(range(3), range(4), range(2)))
    return SidTokens(torch.tensor(every[::2] + every[1::6]), (3, 4, 2))


@pytest.fixture(scope="module")
def model(tokens):
    use_reference_ops()
    model = new_model(RECIPE, tokens).eval()
    with torch.no_grad():
        # Untrained logits are nearly equal; these are not.
        model.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def test_recall_and_ndcg_by_hand():
    ranked = torch.tensor([[4, 1, 2], [0, 3, 1], [5, 6, -1]])
    recall, ndcg = recall_ndcg(ranked, torch.tensor([4, 1, 0]), k=3)
    assert recall == pytest.approx(2 / 3)
    assert ndcg == pytest.approx((1 + 1 / math.log2(4)) / 3)
    assert recall_ndcg(ranked, torch.tensor([4, 1, 0]), k=2)[0] == pytest.approx(1 / 3)


def test_drop_seen_keeps_the_order_and_pads():
    found = torch.tensor([[4, 1, 2, 0], [3, 2, -1, -1]])
    assert drop_seen(found, [[1, 9], [2]], k=2).tolist() == [[4, 2], [3, -1]]


def test_prompts_hold_the_last_films_in_order(tokens):
    assert prompts([[0, 1, 2], [2]], tokens, window=2) == [
        [1, *tokens.films[1].tolist(), *tokens.films[2].tolist()],
        [1, *tokens.films[2].tolist()],
    ]


@pytest.mark.parametrize("beam_width", [1, 5, 40])
def test_beam_search_against_scoring_every_film(model, tokens, beam_width):
    asked = [tokens.prompt([0, 3]), tokens.prompt([5]), tokens.prompt([7, 2])]
    films, scores = beam_search(model, asked, tokens, beam_width, batch_size=2)
    count = min(beam_width, len(tokens.codes))
    for prompt, row, row_scores in zip(asked, films, scores):
        exact = _score_all(model, prompt, tokens)
        assert (row[count:] == -1).all()
        assert len(set(row[:count].tolist())) == count
        torch.testing.assert_close(row_scores[:count], exact[row[:count]], atol=1e-4, rtol=0)
        if beam_width >= 12:  # no prefix is pruned
            assert row[:count].tolist() == exact.argsort(descending=True)[:count].tolist()


@torch.no_grad()
def _score_all(model, prompt, tokens):
    ids = torch.tensor([[*prompt, *film] for film in tokens.films.tolist()])
    logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
    total = torch.zeros(len(ids))
    for level, (first, size) in enumerate(zip(tokens.first, tokens.codebook_sizes)):
        logprobs = logits[:, level, first : first + size].log_softmax(-1)
        total += logprobs.gather(1, tokens.codes[:, level : level + 1])[:, 0]
    return total
