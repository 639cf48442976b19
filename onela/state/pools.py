"""Tensors that grow along one axis, keeping what they hold."""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingTensors:
    """Named tensors that share one growing axis (the first).

    Args:
        shapes: name -> (shape without the growing axis, dtype).
        device: where they live.
        limit: the most places that will ever be asked for; None when that is not known.

    `generation` counts the calls that reallocate: whoever keeps a pointer (a captured graph) compares it.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        *,
        limit: int | None = None,
    ) -> None:
        self.shapes = shapes
        self.device = device
        self.limit = limit
        self.capacity = 0
        self.generation = 0
        self.tensors: dict[str, Tensor] = {
            name: torch.empty((0, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` places (see `grown_capacity`)."""
        if capacity <= self.capacity:
            return
        capacity = grown_capacity(capacity, self.capacity, self.limit)
        # Memory may end half-way: then some tensors are new, and longer than the others, until a later call.
        self.generation += 1
        for name, (shape, dtype) in self.shapes.items():
            grown = torch.empty((capacity, *shape), dtype=dtype, device=self.device)
            grown[: self.capacity] = self.tensors[name][: self.capacity]
            self.tensors[name] = grown
        self.capacity = capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def grown_capacity(needed: int, capacity: int, limit: int | None) -> int:
    """Places of a pool that must grow: half as many again, so that growth stays rare, but no more than can be used."""
    ample = capacity * 3 // 2
    return max(needed, ample if limit is None else min(ample, limit))
