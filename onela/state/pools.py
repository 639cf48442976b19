"""Tensors that grow along one axis, keeping what they hold."""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingTensors:
    """Named tensors that share one growing axis (the first).

    Args:
        shapes: name -> (shape without the growing axis, dtype).
        device: where they live.

    `generation` counts the calls that reallocate: whoever keeps a pointer (a captured graph) compares it.
    """

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self.shapes = shapes
        self.device = device
        self.capacity = 0
        self.generation = 0
        self.tensors: dict[str, Tensor] = {
            name: torch.empty((0, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` places (by half as much again, so that growth stays rare)."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, self.capacity * 3 // 2)
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
