"""Tensors that grow keep what they hold, also when memory ends half-way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onela.state.pools import GrowingTensors

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((2,), torch.float32),
    "b": ((), torch.int32),
    "c": ((3,), torch.float32),
}


def filled(capacity: int) -> tuple[GrowingTensors, dict[str, Tensor]]:
    """A pool full of different numbers, and a copy of them."""
    pool = GrowingTensors(SHAPES, torch.device("cpu"))
    pool.reserve(capacity)
    for tensor in pool.tensors.values():
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
    return pool, {name: tensor.clone() for name, tensor in pool.tensors.items()}


def test_growing_keeps_what_is_held_and_leaves_room() -> None:
    pool, before = filled(4)
    generation = pool.generation
    pool.reserve(4)
    assert pool.generation == generation
    pool.reserve(5)
    assert pool.capacity == 6
    assert pool.generation == generation + 1
    for name, tensor in before.items():
        assert pool.tensors[name].shape[0] == 6
        assert torch.equal(pool.tensors[name][:4], tensor)
    assert pool.nbytes == 6 * (8 + 4 + 12)


def test_a_pool_with_a_limit_takes_no_more_than_can_be_used() -> None:
    pool = GrowingTensors(SHAPES, torch.device("cpu"), limit=11)
    pool.reserve(8)
    pool.reserve(9)
    assert pool.capacity == 11
    pool.reserve(11)
    assert pool.generation == 2


@pytest.mark.parametrize("given", range(len(SHAPES)))
def test_memory_that_ends_half_way(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    pool, before = filled(4)
    generation = pool.generation
    empty, count = torch.empty, 0

    def scarce(*args: Any, **options: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > given:
            raise torch.OutOfMemoryError("none left")
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            pool.reserve(10)
    assert pool.capacity == 4
    # A tensor that was replaced has taken its old memory with it: nobody may go on with a pointer.
    assert pool.generation != generation
    pool.reserve(7)
    assert pool.capacity == 7
    for name, tensor in before.items():
        assert pool.tensors[name].shape[0] == 7
        assert torch.equal(pool.tensors[name][:4], tensor)
