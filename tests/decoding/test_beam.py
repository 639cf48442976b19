"""The search step around the op: histories, widths that can never be filled."""

from __future__ import annotations

import torch

from onela.decoding import Beams, BeamSearch
from onela.items import ItemTrie

SIDS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 1, 1)]


def search() -> BeamSearch:
    return BeamSearch(ItemTrie.from_sids(torch.tensor(SIDS, dtype=torch.int32).numpy(), (3, 2, 2)).to("cpu"))


def test_widths_are_limited_by_what_is_legal() -> None:
    assert search().limit_widths((50, 50, 50), (3, 2, 2)) == (2, 3, 4)
    assert search().limit_widths((1, 50, 50), (3, 2, 2)) == (1, 2, 4)
    assert BeamSearch(None).limit_widths((50, 5, 50), (3, 2, 2)) == (3, 5, 10)


def test_histories_follow_their_parents_and_stand_in_order() -> None:
    beams = [Beams.root(torch.device("cpu"))]
    logits = torch.zeros(1, 3)
    for level, width in enumerate((2, 3, 4)):
        beams = search().step(level, logits, beams, [width])
        logits = torch.zeros(width, 2)
    assert beams[0].codes.tolist() == [list(sid) for sid in SIDS]
    assert beams[0].trie_nodes.tolist() == [0, 1, 2, 3]
    assert beams[0].parent_beams.tolist() == [0, 0, 1, 2]


def test_two_requests_do_not_touch() -> None:
    root = Beams.root(torch.device("cpu"))
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    one, two = search().step(0, logits, [root, root], [1, 2])
    alone = search().step(0, logits[1:], [root], [2])[0]
    assert one.codes.tolist() == [[2]]
    assert torch.equal(two.codes, alone.codes)
    assert torch.equal(two.cum_logprobs, alone.cum_logprobs)


def test_places_without_a_legal_beam_are_padding() -> None:
    [beams] = search().step(0, torch.zeros(1, 3), [Beams.root(torch.device("cpu"))], [3])
    assert beams.alive.tolist() == [True, True, False]
    assert beams.codes.tolist() == [[0], [2], [-1]]
    [after] = search().step(1, torch.zeros(3, 2), [beams], [5])
    assert after.codes.tolist()[:3] == [[0, 0], [0, 1], [2, 1]]
    assert after.codes.tolist()[3:] == [[-1, -1], [-1, -1]]
    assert after.alive.tolist() == [True, True, True, False, False]
