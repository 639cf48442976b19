"""The prompt pool's recurrent states, whole or as two halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela.ops.gated_delta import merge_state
from onela.state import AttentionGeometry, GatedDeltaGeometry, PromptPool

LAYERS = (GatedDeltaGeometry(2, 4, 8, 6), AttentionGeometry(1, 8))


def pool(split: bool) -> PromptPool:
    made = PromptPool(LAYERS, dtype=torch.bfloat16, device=torch.device("cpu"), split_states=split)
    for _ in range(3):
        made.allocate(10)
    return made


def test_split_states_take_the_same_bytes_and_keep_16_bits() -> None:
    whole, split = pool(False), pool(True)
    assert whole.prompt_tensors.nbytes == split.prompt_tensors.nbytes
    assert split.layer(0, "recurrent_state").shape == (3, 4, 2, 6, 8)
    states = torch.randn(3, 4, 6, 8)
    split.write_recurrent_states(0, torch.arange(3), states)
    given = merge_state(split.layer(0, "recurrent_state"))
    assert given.dtype == torch.float32
    assert bool(((given - states).abs() <= states.abs() * 2**-15).all())


def test_the_generation_changes_when_a_tensor_is_replaced() -> None:
    made = pool(False)
    before = made.generation
    made.free(made.allocate(10))
    assert made.generation == before or made.prompt_tensors.capacity > 3
    now = made.generation
    made.allocate(100_000)
    assert made.generation != now


def test_no_memory_for_a_row_of_the_page_table_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(False)

    def fail(*_: Any) -> Any:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(made, "reserve_table", fail)
        with pytest.raises(MemoryError):
            made.allocate(10)
    assert (made.places.num_taken, made.pages.num_taken) == (3, 3)
    assert made.allocate(10).index == 3
