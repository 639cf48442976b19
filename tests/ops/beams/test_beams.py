"""Beams packed into a step and moved on: the references against histories in plain Python, the kernels against them."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops.beams import kernels, reference
from onela.ops.beams.columns import HEAD, INVALID, NODE, PARENT, SCORE, ancestors_at, row_size, scores_at

LEVELS = 5
KERNELS = {"reference": ("_ref", reference), "kernels": ("", kernels)}


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def bounds(sizes: list[int], device: torch.device) -> Tensor:
    return ints([0, *torch.tensor(sizes).cumsum(0).tolist()], device)


class History:
    """What a beam has gone through, in Python's own numbers."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.scores: list[float] = []
        self.slots: list[int] = []
        self.node, self.parent, self.alive = 0, -1, True


def check_rows(beams: Tensor, first: int, expected: list[History], depth: int) -> None:
    rows = beams[first : first + len(expected)].cpu()
    for row, want in zip(rows, expected):
        node = int(row[NODE : NODE + 2].view(torch.int64))
        assert node == (want.node if want.alive else -1)
        assert int(row[PARENT]) == (want.parent if want.alive else -1)
        if not want.alive:
            assert float(row[SCORE : SCORE + 1].view(torch.float32)) == float("-inf")
            assert row[HEAD : HEAD + len(want.codes)].tolist() == [-1] * len(want.codes)
            continue
        level = len(want.codes)
        assert row[HEAD : HEAD + level].tolist() == want.codes
        at = scores_at(LEVELS)
        assert row[at : at + level].view(torch.float32).tolist() == want.scores
        assert float(row[SCORE : SCORE + 1].view(torch.float32)) == want.scores[-1]
        at = ancestors_at(LEVELS)
        assert row[at : at + depth].tolist() == want.slots[:depth]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_every_beam_keeps_its_own_history(name: str, seed: int, device: torch.device) -> None:
    """Requests of any widths, beams that die and bring forth, survivors that lie where their parents lay."""
    suffix, module = KERNELS[name]
    pack_step, pack_beams, advance = (
        getattr(module, f"{op}{suffix}") for op in ("pack_step", "pack_beams", "advance_beams")
    )
    if name == "reference":
        device = torch.device("cpu")
    chance = random.Random(seed)
    R = chance.choice([1, 3, 5])
    widths = [[chance.randint(1, 40) for _ in range(LEVELS)] for _ in range(R)]
    gaps = [chance.randint(0, 5) for _ in range(R)]
    first_rows = [sum(max(w) for w in widths[:r]) + sum(gaps[: r + 1]) for r in range(R)]
    beams = torch.full((first_rows[-1] + max(widths[-1]) + 7, row_size(LEVELS)), 77, dtype=torch.int32)
    beams = beams.to(device)
    padded = R + chance.randint(0, 3)
    spare = [0] * (padded - R)
    token_table = torch.arange(1000, 1000 + LEVELS * 50, dtype=torch.int32, device=device)
    histories = [[History()] for _ in range(R)]
    slots = [1000 * r for r in range(R)]
    for level in range(LEVELS):
        before = [len(h) for h in histories]
        out = [w[level] for w in widths]
        cu_rows = bounds(before + spare, device)
        N, M = sum(before) + chance.randint(0, 20), sum(out) + chance.randint(0, 20)
        if level:
            check_packed_step(
                pack_step, beams, histories, first_rows, slots, token_table, cu_rows, N, level, device
            )
        starts = [chance.randint(0, 99) for _ in range(R)]
        cum, nodes, hidden, rows = pack_beams(
            beams,
            cu_rows=cu_rows,
            first_rows=ints(first_rows + spare, device),
            hidden_starts=ints(starts + spare, device),
            num_rows=N,
            level=level,
            num_levels=LEVELS,
        )
        flat = [(r, b, h) for r, hs in enumerate(histories) for b, h in enumerate(hs)]
        assert hidden.tolist() == [starts[r] + b for r, b, _ in flat] + [0] * (N - len(flat))
        assert nodes.tolist() == [h.node if h.alive else -1 for _, _, h in flat] + [-1] * (N - len(flat))
        scores = [h.scores[-1] if h.scores else 0.0 for _, _, h in flat]
        alive = [h.alive for _, _, h in flat]
        wanted = [s if a else float("-inf") for s, a in zip(scores, alive)] + [float("-inf")] * (
            N - len(flat)
        )
        assert cum.tolist() == wanted
        parents, codes, totals, children, after = [], [], [], [], []
        for r, hs in enumerate(histories):
            first = sum(before[:r])
            living = [b for b, h in enumerate(hs) if h.alive]
            count = chance.randint(1, out[r]) if chance.random() < 0.3 else out[r]
            chosen = sorted(chance.choice(living) for _ in range(count)) if living else []
            own = []
            for place in range(out[r]):
                child = History()
                if place < len(chosen):
                    parent = hs[chosen[place]]
                    child.codes = [*parent.codes, chance.randrange(50)]
                    child.scores = [*parent.scores, float(torch.tensor(-chance.random()))]
                    child.node = chance.choice([place, 2**33 + place, 2**31 - 1])
                    child.parent = chosen[place]
                    written = slots[r] + chosen[place] if slots[r] >= 0 else -1
                    child.slots = [*parent.slots, written] if level else []
                else:
                    child.alive = False
                    child.codes = [-1] * (level + 1)
                parents.append(first + child.parent if child.alive else -1)
                codes.append(child.codes[-1])
                totals.append(child.scores[-1] if child.alive else float("-inf"))
                children.append(child.node if child.alive else -1)
                own.append(child)
            after.append(own)
        fill = M - len(parents)
        finite = torch.ones(N, dtype=torch.bool, device=device)
        marked = chance.randrange(R)
        unusable = sum(before[:marked]) + chance.randrange(before[marked])
        finite[unusable] = False
        finite[len(flat) :] = False
        marks = beams[first_rows, INVALID].tolist()
        advance(
            beams,
            rows,
            ints(parents + [-1] * fill, device),
            ints(codes + [-1] * fill, device),
            torch.tensor(totals + [float("-inf")] * fill, device=device),
            torch.tensor(children + [-1] * fill, dtype=torch.int64, device=device),
            trie_nodes=nodes,
            finite=finite,
            cu_rows=cu_rows,
            cu_out=bounds(out + spare, device),
            first_rows=ints(first_rows + spare, device),
            first_slots=ints((slots if level else [-1] * R) + spare, device),
            level=level,
            num_levels=LEVELS,
        )
        if level == 0:
            assert marks == [0] * R
        dead = not histories[marked][unusable - sum(before[:marked])].alive
        expected = [m if r != marked or dead else 1 for r, m in enumerate(marks)]
        assert beams[first_rows, INVALID].tolist() == expected
        for r in range(R):
            if level:
                slots[r] = slots[r] + before[r] if level < LEVELS - 2 else -1
        histories = after
        for r in range(R):
            check_rows(beams, first_rows[r], histories[r], level)
    taken = {first + b for first, w in zip(first_rows, widths) for b in range(max(w))}
    others = [row for row in range(len(beams)) if row not in taken]
    assert bool((beams[others] == 77).all())


def check_packed_step(
    pack_step,
    beams: Tensor,
    histories: list[list[History]],
    first_rows: list[int],
    slots: list[int],
    token_table: Tensor,
    cu_rows: Tensor,
    N: int,
    level: int,
    device: torch.device,
) -> None:
    R, spare = len(histories), cu_rows.shape[0] - 1 - len(histories)
    starts, lengths = [50 * (level - 1)] * R, [100 + 3 * r for r in range(R)]
    depth = level - 1 + 2
    fields, ancestors = pack_step(
        beams,
        token_table=token_table,
        cu_rows=cu_rows,
        first_rows=ints(first_rows + [0] * spare, device),
        first_slots=ints(slots + [0] * spare, device),
        prompts=ints([7 + r for r in range(R)] + [-1] * spare, device),
        depths=ints([level - 1] * R + [0] * spare, device),
        lengths=ints(lengths + [0] * spare, device),
        token_starts=ints(starts + [0] * spare, device),
        num_rows=N,
        depth=depth,
        num_levels=LEVELS,
    )
    assert fields.shape == (7, N)
    assert ancestors.shape == (N, depth)
    columns = fields.T.tolist()
    n = 0
    for r, hs in enumerate(histories):
        for b, h in enumerate(hs):
            token, position, slot, row, parent, prompt, at = columns[n]
            assert (position, at) == (lengths[r] + level - 1, level - 1)
            if h.alive:
                assert token == 1000 + starts[r] + h.codes[-1]
                assert (slot, row, prompt) == (slots[r] + b, first_rows[r] + b, 7 + r)
                assert parent == (first_rows[r] + h.parent if level > 1 else -1)
                assert ancestors[n].tolist() == [*h.slots[: level - 1], *[-1] * (depth - level + 1)]
            else:
                assert (slot, row, parent, prompt) == (-1, -1, -1, -1)
            n += 1
    assert columns[n:] == [[0, 0, -1, -1, -1, -1, 0]] * (N - n)
    assert bool((ancestors[n:] == -1).all())


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "kernels"])
def test_a_row_of_another_size_is_refused(module: ModuleType) -> None:
    pack = getattr(module, "pack_beams", None) or module.pack_beams_ref
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="beams"):
        pack(
            torch.zeros(4, 5, dtype=torch.int32),
            cu_rows=torch.zeros(2, dtype=torch.int32),
            first_rows=one,
            hidden_starts=one,
            num_rows=1,
            level=0,
            num_levels=LEVELS,
        )


def test_nothing_is_no_trouble() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for module, suffix in ((reference, "_ref"), (kernels, "")):
        fields, ancestors = getattr(module, f"pack_step{suffix}")(
            torch.zeros(0, row_size(LEVELS), dtype=torch.int32),
            token_table=torch.zeros(1, dtype=torch.int32),
            cu_rows=torch.zeros(1, dtype=torch.int32),
            first_rows=none,
            first_slots=none,
            prompts=none,
            depths=none,
            lengths=none,
            token_starts=none,
            num_rows=0,
            depth=2,
            num_levels=LEVELS,
        )
        assert (fields.shape, ancestors.shape) == ((7, 0), (0, 2))
