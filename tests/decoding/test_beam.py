"""The search step around the op: where survivors go, histories, widths that can never be filled."""

from __future__ import annotations

import torch

from onela.decoding import BeamPool, Beams, BeamSearch, PackedBeams, Selection
from onela.items import ItemTrie

SIDS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 1, 1)]
CPU = torch.device("cpu")


def search() -> BeamSearch:
    return BeamSearch(ItemTrie.from_sids(torch.tensor(SIDS, dtype=torch.int32).numpy(), (3, 2, 2)).to("cpu"))


class Requests:
    """Requests whose beams lie one after the other in a pool."""

    def __init__(self, *places: int) -> None:
        self.pool = BeamPool(3, CPU)
        self.first_rows = [sum(places[:r]) for r in range(len(places))]
        self.pool.reserve(sum(places))
        self.widths = [1] * len(places)
        self.level = 0

    def step(self, logits: torch.Tensor, widths: list[int]) -> None:
        selection = Selection.of(self.level, self.widths, widths, self.first_rows, CPU)
        search().step(self.pool, selection, PackedBeams.of(self.pool, selection), logits)
        self.level, self.widths = self.level + 1, widths

    def beams(self, request: int = 0) -> Beams:
        return self.pool.beams(self.first_rows[request], self.widths[request], self.level)


def test_widths_are_limited_by_what_is_legal() -> None:
    assert search().limit_widths((50, 50, 50), (3, 2, 2)) == (2, 3, 4)
    assert search().limit_widths((1, 50, 50), (3, 2, 2)) == (1, 2, 4)
    assert BeamSearch(None).limit_widths((50, 5, 50), (3, 2, 2)) == (3, 5, 10)


def test_histories_follow_their_parents_and_stand_in_order() -> None:
    requests = Requests(4)
    assert requests.beams().codes.shape == (1, 0)
    logits = torch.zeros(1, 3)
    for width in (2, 3, 4):
        requests.step(logits, [width])
        logits = torch.zeros(width, 2)
    beams = requests.beams()
    assert beams.codes.tolist() == [list(sid) for sid in SIDS]
    assert beams.trie_nodes.tolist() == [0, 1, 2, 3]
    assert beams.parent_beams.tolist() == [0, 0, 1, 2]


def test_two_requests_do_not_touch() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    both, alone = Requests(1, 2), Requests(2)
    both.step(logits, [1, 2])
    alone.step(logits[1:], [2])
    assert both.beams(0).codes.tolist() == [[2]]
    assert torch.equal(both.beams(1).codes, alone.beams().codes)
    assert torch.equal(both.beams(1).cum_logprobs, alone.beams().cum_logprobs)


def test_places_without_a_legal_beam_are_padding() -> None:
    requests = Requests(5)
    requests.step(torch.zeros(1, 3), [3])
    assert requests.beams().alive.tolist() == [True, True, False]
    assert requests.beams().codes.tolist() == [[0], [2], [-1]]
    requests.step(torch.zeros(3, 2), [5])
    after = requests.beams()
    assert after.codes.tolist()[:3] == [[0, 0], [0, 1], [2, 1]]
    assert after.codes.tolist()[3:] == [[-1, -1], [-1, -1]]
    assert after.alive.tolist() == [True, True, True, False, False]
