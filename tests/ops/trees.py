"""Random beam trees over packed requests of different widths and depths: the common ground of the ops' tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onela.ops.indexing import PAD

SHAPES: list[list[list[int]]] = [
    [[1]],
    [[3, 3, 3]],
    [[1, 5, 2, 7], [4], [6, 6]],
    [[2, 1, 1, 1, 1, 9], [33, 65]],
]
"""The width of every step of every request."""


@dataclass
class Tree:
    """Every token of every step, one row a slot, and which slots each live beam descends from.

    `steps[s]` holds the slots that request by request were written at step `s`; requests stop at different steps.
    `ancestors[slot]` are the slots above a slot, oldest first.
    """

    num_slots: int
    ancestors: list[list[int]]
    requests: list[list[list[int]]]

    def chain(self, slot: int) -> list[int]:
        return [*self.ancestors[slot], slot]


def grow_tree(widths: list[list[int]], *, seed: int = 0, spare: int = 5) -> Tree:
    """Grow one tree per request; `widths[r][s]` beams at step `s`, parents drawn with repeats, slots shuffled."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sum(w) for w in widths)
    order = torch.randperm(total + spare, generator=generator).tolist()
    ancestors: list[list[int]] = [[] for _ in range(total + spare)]
    requests = []
    for steps in widths:
        levels: list[list[int]] = []
        for width in steps:
            slots = [order.pop() for _ in range(width)]
            if levels:
                parents = torch.randint(len(levels[-1]), (width,), generator=generator).tolist()
                for slot, parent in zip(slots, parents):
                    above = levels[-1][parent]
                    ancestors[slot] = [*ancestors[above], above]
            levels.append(slots)
        requests.append(levels)
    return Tree(total + spare, ancestors, requests)


def int32(values: Any, device: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def step_index(
    tree: Tree,
    level: list[int | None],
    prompts: list[int],
    device: Any,
    *,
    tail: int = 0,
    pad_every: int = 0,
    extra_depth: int = 0,
) -> tuple[dict[str, Tensor], list[int]]:
    """The index tensors of one step: `level[r]` is the step request `r` is at, None for a request without rows.

    `tail` rows lie behind the last request; every `pad_every`-th row is padding; `extra_depth` columns of
    ancestors are more than anyone needs. Returns the tensors and the slot of each row (PAD for padding).
    """
    rows: list[int] = []
    bounds = [0]
    for r, step in enumerate(level):
        rows += [] if step is None else tree.requests[r][step]
        bounds.append(len(rows))
    columns = max([step for step in level if step is not None], default=0) + extra_depth
    slots = [PAD if pad_every and n % pad_every == 1 else slot for n, slot in enumerate(rows)] + [PAD] * tail
    ancestors = torch.full((len(slots), columns), PAD, dtype=torch.int32)
    for n, slot in enumerate(rows):
        above = tree.ancestors[slot]
        ancestors[n, : len(above)] = torch.tensor(above, dtype=torch.int32)
    index = {
        "slots": int32(slots, device),
        "ancestors": ancestors.to(device),
        "cu_rows": int32(bounds, device),
        "prompts": int32(prompts, device),
        "depths": int32([0 if step is None else step for step in level], device),
    }
    return index, slots


@dataclass
class LastStep:
    """The last step of every request.

    Attributes:
        index: what an op is handed. num_slots: slots in all.
        paths: for each row, slots from the oldest ancestor to its own; None for a dead row.
        request_of: request of each row.
    """

    index: dict[str, Tensor]
    num_slots: int
    paths: list[list[int] | None]
    request_of: list[int]


def random_tree(
    widths: list[list[int]], *, seed: int = 0, dead: float = 0.0, prompts: list[int] | None = None
) -> LastStep:
    """Grow a tree and stand at its last step; `dead` is the share of its rows that do not live."""
    tree = grow_tree(widths, seed=seed, spare=3)
    prompts = list(range(len(widths))) if prompts is None else prompts
    index, slots = step_index(tree, [len(steps) - 1 for steps in widths], prompts, "cpu")
    is_dead = torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < dead
    index["slots"][is_dead] = PAD
    index["ancestors"][is_dead] = PAD
    paths = [None if gone else tree.chain(slot) for slot, gone in zip(slots, is_dead.tolist())]
    request_of = [request for request, steps in enumerate(widths) for _ in range(steps[-1])]
    return LastStep(index, tree.num_slots, paths, request_of)
