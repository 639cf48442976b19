"""Random beam trees: packed requests of different widths and depths, in the middle of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAD = -1


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


@dataclass
class Sizes:
    H: int = 2
    HV: int = 4
    K: int = 32
    V: int = 64


def random_rows(n: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, seed: int = 1) -> dict[str, Tensor]:
    """Rows `q, k, v, g, beta` of `n` tokens; the gates stay fp32 (fp64 for fp64 rows)."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = {
        "q": normal(n, sizes.H, sizes.K).to(dtype),
        "k": normal(n, sizes.H, sizes.K).to(dtype),
        "v": normal(n, sizes.HV, sizes.V).to(dtype),
        "g": -normal(n, sizes.HV).abs().mul(0.3).to(gates),
        "beta": normal(n, sizes.HV).sigmoid().to(gates),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def random_state(num_prompts: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_prompts, sizes.HV, sizes.V, sizes.K)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.2).to(device, dtype)


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


def empty_records(
    num_slots: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, k_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Records full of NaN: what no step has written must never be read."""
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    nan = float("nan")
    return {
        "records_g": torch.full((num_slots, sizes.HV), nan, dtype=gates, device=device),
        "records_delta": torch.full((num_slots, sizes.HV, sizes.V), nan, dtype=dtype, device=device),
        "records_k": torch.full((num_slots, sizes.H, sizes.K), nan, dtype=k_dtype or dtype, device=device),
    }
