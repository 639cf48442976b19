"""Random beam trees over packed requests, and the token path of every beam: the common ground of the ops' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onela.ops.indexing import RowIndex


@dataclass
class Tree:
    """Requests of different widths, depths and prompts, seen at their last step.

    Attributes:
        steps: for each request, the slots of each step. index: what an op is handed at the last step.
        paths: for each row of the last step, slots from the oldest ancestor to its own; None for a dead row.
        request_of: request of each row. num_slots: slots in all.
    """

    steps: list[list[list[int]]]
    index: RowIndex
    paths: list[list[int] | None]
    request_of: list[int]
    num_slots: int
    prompts: list[int]


def random_tree(
    widths: list[list[int]], *, seed: int = 0, dead: float = 0.0, prompts: list[int] | None = None
) -> Tree:
    """A tree with the given width of every step of every request, parents drawn at random (so they repeat)."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(map(sum, widths))
    order = torch.randperm(total + 3, generator=generator).tolist()
    prompts = list(range(len(widths))) if prompts is None else prompts
    depth = max((len(w) - 1 for w in widths), default=0)
    steps: list[list[list[int]]] = []
    rows: list[list[int]] = []
    slots: list[int] = []
    paths: list[list[int] | None] = []
    request_of: list[int] = []
    cu_rows = [0]
    for request, request_widths in enumerate(widths):
        live: list[list[int]] = []
        own: list[list[int]] = []
        for step, width in enumerate(request_widths):
            taken = [order.pop() for _ in range(width)]
            own.append(taken)
            if step == 0:
                live = [[slot] for slot in taken]
            else:
                parents = torch.randint(0, len(live), (width,), generator=generator).tolist()
                live = [[*live[p], slot] for p, slot in zip(parents, taken)]
        steps.append(own)
        for path in live:
            is_dead = bool(torch.rand((), generator=generator) < dead)
            ancestors = path[:-1]
            slots.append(-1 if is_dead else path[-1])
            rows.append([-1] * depth if is_dead else [*ancestors, *[-1] * (depth - len(ancestors))])
            paths.append(None if is_dead else path)
            request_of.append(request)
        cu_rows.append(len(rows))
    index: RowIndex = {
        "slots": torch.tensor(slots, dtype=torch.int32),
        "ancestors": torch.tensor(rows, dtype=torch.int32).reshape(len(rows), depth),
        "cu_rows": torch.tensor(cu_rows, dtype=torch.int32),
        "prompts": torch.tensor(prompts, dtype=torch.int32),
        "depths": torch.tensor([len(w) - 1 for w in widths], dtype=torch.int32),
    }
    return Tree(steps, index, paths, request_of, total + 3, prompts)


SHAPES: list[list[list[int]]] = [
    [[1]],
    [[3, 3, 3]],
    [[1, 5, 2, 7], [4], [6, 6]],
    [[2, 1, 1, 1, 1, 9], [33, 65]],
]
