"""Tensors of more than 2**31 elements: an offset that is computed in 32 bits reads or writes somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onela.ops.gated_delta.reference import replay_step_ref, split_state
from onela.ops.indexing import copy_rows
from tests.ops.gated_delta.scenario import Sizes, empty_records, random_rows, random_state
from tests.ops.trees import grow_tree, step_index

pytest.importorskip("triton")
from onela.ops.gated_delta.full_state import full_state_step_triton, reorder_states
from onela.ops.gated_delta.reference import full_state_step_ref, replay_ssm_step_ref
from onela.ops.gated_delta.replay import replay_step_triton
from onela.ops.gated_delta.replay_ssm import replay_ssm_step_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the memory of a large GPU"),
]

SIZES = Sizes(H=16, HV=16, K=128, V=128)
CUDA = torch.device("cuda")
LIMIT = {"rtol": 2e-5, "atol": 2e-5}


def behind(rows: Tensor, first: int) -> Tensor:
    """A tensor whose rows from `first` on are these; what lies before is never to be read."""
    if torch.cuda.mem_get_info()[0] < 2 * (first + len(rows)) * rows[0].numel() * rows.element_size():
        pytest.skip("needs more free memory")
    large = torch.empty(first + len(rows), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    large[first:] = rows
    assert large.numel() > 2**31 or rows[0].numel() < 2048
    return large


def moved(index: Tensor, first: int) -> Tensor:
    return torch.where(index >= 0, index + first, index)


def kernels() -> list[Callable[..., Tensor]]:
    found: list[Callable[..., Tensor]] = [replay_step_triton]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        from onela.ops.gated_delta.replay_hopper import replay_step_hopper

        found.append(replay_step_hopper)
    return found


@pytest.mark.parametrize("step", kernels(), ids=lambda step: step.__name__)
@pytest.mark.parametrize("key_given", [True, False])
def test_replay(step: Callable[..., Tensor], key_given: bool) -> None:
    """Records and prompt states that begin behind 2**31 elements."""
    tree = grow_tree([[9, 40, 33], [3, 33, 65]])
    index, slots = step_index(tree, [2, 2], [0, 1], CUDA, pad_every=5)
    rows: dict[str, Any] = random_rows(len(slots), SIZES, torch.bfloat16, CUDA)
    state = split_state(random_state(2, SIZES, torch.float32, CUDA))
    old = random_rows(tree.num_slots, SIZES, torch.bfloat16, CUDA, seed=3)
    records = {"records_g": old["g"], "records_delta": old["v"].float() * 0.1, "records_k": old["k"]}
    live = index["slots"] >= 0
    if not key_given:
        records["records_k"][index["slots"][live].long()] = rows["k"][live]
        rows["k"] = None
    first, first_prompt = 2**20, 2**12
    given = {name: behind(tensor, first) for name, tensor in records.items()}
    far = index | {name: moved(index[name], first) for name in ("slots", "ancestors")}
    far["prompts"] = moved(index["prompts"], first_prompt)
    o = step(**rows, recurrent_state=behind(state, first_prompt), **given, **far, out_dtype=torch.float32)
    expected = replay_step_ref(**rows, recurrent_state=state, **records, **index, out_dtype=torch.float32)
    torch.testing.assert_close(o, expected, **LIMIT)
    for name, tensor in given.items():
        torch.testing.assert_close(tensor[first:], records[name], **LIMIT)


@pytest.mark.parametrize("step", kernels(), ids=lambda step: step.__name__)
def test_more_rows_than_fit_into_32_bits(step: Callable[..., Tensor]) -> None:
    """The last rows of a batch whose q, v and output have more than 2**31 elements, and the same rows alone."""
    few, first = 70, 2**20
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free memory")
    rows: dict[str, Any] = random_rows(few, SIZES, torch.bfloat16, CUDA)
    state = split_state(random_state(1, SIZES, torch.float32, CUDA))
    small = empty_records(few, SIZES, torch.bfloat16, CUDA)
    small["records_g"] = small["records_g"].float()

    def index(count: int, slots: Tensor) -> dict[str, Tensor]:
        def int32(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=CUDA)

        return {
            "slots": slots,
            "ancestors": torch.empty(count, 0, dtype=torch.int32, device=CUDA),
            "cu_rows": int32(0, count),
            "prompts": int32(0),
            "depths": int32(0),
        }

    own = torch.arange(few, dtype=torch.int32, device=CUDA)
    alone = step(**rows, recurrent_state=state, **small, **index(few, own))
    # Rows before the last ones are padding: their records are not there.
    slots = torch.cat([torch.full((first,), -1, dtype=torch.int32, device=CUDA), own])
    many = {name: behind(tensor, first) for name, tensor in rows.items()}
    kept = {name: tensor.clone() for name, tensor in small.items()}
    o = step(**many, recurrent_state=state, **kept, **index(first + few, slots))
    assert torch.equal(o[first:], alone)
    assert not o[:first].any()
    assert all(torch.equal(kept[name], small[name]) for name in kept)


def test_full_state() -> None:
    """States of rows that begin behind 2**31 elements, copied and stepped."""
    few, first = 6, 2**13
    rows = random_rows(few, SIZES, torch.bfloat16, CUDA)
    states = random_state(2 * few, SIZES, torch.float32, CUDA, seed=5)
    prompt = random_state(1, SIZES, torch.float32, CUDA)
    large = behind(states, first)
    own = torch.arange(few, dtype=torch.int32, device=CUDA)
    read, write = own.flip(0), own + few
    none = torch.zeros_like(own)
    index = {"recurrent_state": prompt, "row_prompts": none}
    o = full_state_step_triton(
        **rows, states=large, read_rows=read + first, write_rows=write + first, **index
    )
    expected = full_state_step_ref(**rows, states=states, read_rows=read, write_rows=write, **index)
    torch.testing.assert_close(o.float(), expected.float(), rtol=2**-7, atol=2e-5)
    torch.testing.assert_close(large[first:], states, **LIMIT)
    taken = torch.empty(few, *states.shape[1:], device=CUDA)
    reorder_states(large, write + first, out=taken)
    assert torch.equal(taken, large[first + few :])
    copy_rows(large, read + first, large, write + first)
    assert torch.equal(large[first : first + few], large[first + few :].flip(0))


def test_replay_ssm() -> None:
    """Checkpoints and buffers whose rows begin behind 2**31 elements."""
    few, first, T = 6, 2**19, 2
    rows = random_rows(few, SIZES, torch.bfloat16, CUDA)
    old = random_rows(few * T, SIZES, torch.bfloat16, CUDA, seed=3)
    buffers = {"buffer_g": old["g"], "buffer_delta": old["v"].float() * 0.1, "buffer_k": old["k"]}
    buffers = {name: tensor.unflatten(0, (few, T)).contiguous() for name, tensor in buffers.items()}
    checkpoints = random_state(few, SIZES, torch.float32, CUDA)
    large = {name: behind(tensor, first) for name, tensor in buffers.items()}
    own = torch.arange(few, dtype=torch.int32, device=CUDA)
    depths = torch.ones_like(own)
    o = replay_ssm_step_triton(
        **rows,
        checkpoints=behind(checkpoints, 2**13),
        checkpoint_rows=own + 2**13,
        **large,
        rows=own + first,
        row_depths=depths,
    )
    expected = replay_ssm_step_ref(
        **rows, checkpoints=checkpoints, checkpoint_rows=own, **buffers, rows=own, row_depths=depths
    )
    torch.testing.assert_close(o.float(), expected.float(), rtol=2**-7, atol=2e-5)
    for name, tensor in large.items():
        torch.testing.assert_close(tensor[first:], buffers[name], **LIMIT)
