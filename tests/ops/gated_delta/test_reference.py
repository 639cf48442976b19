"""The references against one another: every way to hold a beam's state gives what token-by-token decoding gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.ops.gated_delta.reference import (
    full_state_step_ref,
    gated_delta_recurrent_ref,
    merge_state,
    replay_ssm_step_ref,
    replay_step_ref,
    split_state,
)
from onela.ops.indexing import PAD
from tests.ops.gated_delta.scenario import Sizes, empty_records, random_rows, random_state
from tests.ops.trees import Tree, grow_tree, int32, step_index
from tests.tolerances import EXACT_FP64

SIZES = Sizes(H=2, HV=4, K=16, V=24)
WIDTHS = [[3, 7, 5, 6], [4, 4], [1, 9, 2]]
PROMPTS = [2, 0, 0]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return grow_tree(WIDTHS, seed=3)


@pytest.fixture(scope="module")
def rows(tree: Tree) -> dict[str, Tensor]:
    """One token per slot: `rows["q"][slot]`."""
    return random_rows(tree.num_slots, SIZES, torch.float64, "cpu")


@pytest.fixture(scope="module")
def state() -> Tensor:
    return random_state(3, SIZES, torch.float64, "cpu")


@pytest.fixture(scope="module")
def expected(tree: Tree, rows: dict[str, Tensor], state: Tensor) -> Tensor:
    """Output of every slot by running its own token sequence from the prompt's state: [num_slots, HV, V]."""
    out = torch.full((tree.num_slots, SIZES.HV, SIZES.V), float("nan"), dtype=torch.float64)
    for request, prompt in zip(tree.requests, PROMPTS):
        for slot in (slot for step in request for slot in step):
            chain = tree.chain(slot)
            packed = {name: tensor[chain] for name, tensor in rows.items()}
            o, _ = gated_delta_recurrent_ref(
                **packed, cu_seqlens=int32([0, len(chain)], "cpu"), initial_state=state[prompt : prompt + 1]
            )
            out[slot] = o[-1]
    return out


def levels(step: int) -> list[int | None]:
    """Requests at their own steps: the second one lags behind and stops early, the third starts late."""
    at = [step, step - 1, step]
    return [s if 0 <= s < len(w) else None for s, w in zip(at, WIDTHS)]


@pytest.mark.parametrize("pad_every", [0, 3])
@pytest.mark.parametrize("key_is_record", [False, True])
def test_replay_follows_every_beam(tree, rows, state, expected, pad_every, key_is_record):
    records = empty_records(tree.num_slots, SIZES, torch.float64, "cpu")
    for step in range(4):
        index, slots = step_index(tree, levels(step), PROMPTS, "cpu", tail=2, extra_depth=step % 2)
        at = torch.tensor(slots).clamp(min=0)
        given = {name: tensor[at] for name, tensor in rows.items()}
        if key_is_record:
            live = index["slots"] >= 0
            records["records_k"][at[live]] = given["k"][live]
            given["k"] = None
        if pad_every:
            # A padded copy of the step must give the same rows and write nothing where it pads.
            padded, padded_slots = step_index(tree, levels(step), PROMPTS, "cpu", tail=2, pad_every=pad_every)
            before = {name: tensor.clone() for name, tensor in records.items()}
            o = replay_step_ref(**given, recurrent_state=state, **records, **padded)
            for n, slot in enumerate(padded_slots):
                wanted = torch.zeros_like(o[n]) if slot == PAD else expected[slot]
                torch.testing.assert_close(o[n], wanted, **EXACT_FP64)
            for n, slot in enumerate(slots):
                if slot != PAD and padded_slots[n] == PAD:
                    torch.testing.assert_close(
                        records["records_delta"][slot], before["records_delta"][slot], equal_nan=True
                    )
        o = replay_step_ref(**given, recurrent_state=state, **records, **index)
        for n, slot in enumerate(slots):
            wanted = torch.zeros_like(o[n]) if slot == PAD else expected[slot]
            torch.testing.assert_close(o[n], wanted, **EXACT_FP64)


def test_replay_of_a_request_without_a_prompt_writes_nothing(tree, rows, state):
    records = empty_records(tree.num_slots, SIZES, torch.float64, "cpu")
    index, slots = step_index(tree, [0, None, 0], [PAD, 0, 1], "cpu")
    given = {name: tensor[torch.tensor(slots)] for name, tensor in rows.items()}
    o = replay_step_ref(**given, recurrent_state=state, **records, **index)
    assert (o[:3] == 0).all()
    assert (o[3:] != 0).any()
    assert records["records_g"][tree.requests[0][0]].isnan().all()


@pytest.mark.parametrize("copy", [True, False])
def test_full_state_follows_every_beam(tree, rows, state, expected, copy):
    """`copy`: gather the parents' states first, then step in place. Otherwise read the parent's, write one's own."""
    size = 2 * sum(max(w) for w in WIDTHS)
    states = torch.full((size, SIZES.HV, SIZES.V, SIZES.K), float("nan"), dtype=torch.float64)
    place = {}
    for step in range(4):
        _, slots = step_index(tree, levels(step), PROMPTS, "cpu")
        free = [row for row in range(size) if row not in place.values()]
        read, write, prompt = [], [], []
        for slot in slots:
            row = free.pop()
            parent = tree.ancestors[slot][-1] if tree.ancestors[slot] else None
            if parent is not None and copy:
                states[row] = states[place[parent]]
                read.append(row)
            else:
                read.append(PAD if parent is None else place[parent])
            write.append(row)
            prompt.append(next(p for r, p in enumerate(PROMPTS) if any(slot in s for s in tree.requests[r])))
        given = {name: tensor[torch.tensor(slots)] for name, tensor in rows.items()}
        o = full_state_step_ref(
            **given,
            states=states,
            recurrent_state=state,
            read_rows=int32(read, "cpu"),
            write_rows=int32(write, "cpu"),
            row_prompts=int32(prompt, "cpu"),
        )
        torch.testing.assert_close(o, expected[torch.tensor(slots)], **EXACT_FP64)
        place = dict(zip(slots, write))


@pytest.mark.parametrize("shared", [True, False])
def test_replay_ssm_follows_every_beam(tree, rows, state, expected, shared):
    size, depth = sum(max(w) for w in WIDTHS), 4
    buffers = {
        "buffer_g": torch.full((size, depth, SIZES.HV), float("nan"), dtype=torch.float64),
        "buffer_delta": torch.full((size, depth, SIZES.HV, SIZES.V), float("nan"), dtype=torch.float64),
        "buffer_k": torch.full((size, depth, SIZES.H, SIZES.K), float("nan"), dtype=torch.float64),
    }
    per_beam = torch.full((size, SIZES.HV, SIZES.V, SIZES.K), float("nan"), dtype=torch.float64)
    place: dict[int, int] = {}
    for step in range(4):
        _, slots = step_index(tree, levels(step), PROMPTS, "cpu")
        prompt = [
            next(p for r, p in enumerate(PROMPTS) if any(s in x for x in tree.requests[r])) for s in slots
        ]
        old = {name: buffer.clone() for name, buffer in buffers.items()}
        for row, slot in enumerate(slots):
            if tree.ancestors[slot]:
                for name, buffer in buffers.items():
                    buffer[row] = old[name][place[tree.ancestors[slot][-1]]]
            per_beam[row] = state[prompt[row]]
        given = {name: tensor[torch.tensor(slots)] for name, tensor in rows.items()}
        o = replay_ssm_step_ref(
            **given,
            checkpoints=state if shared else per_beam,
            checkpoint_rows=int32(prompt if shared else list(range(len(slots))), "cpu"),
            **buffers,
            rows=int32(range(len(slots)), "cpu"),
            row_depths=int32([len(tree.ancestors[slot]) for slot in slots], "cpu"),
        )
        torch.testing.assert_close(o, expected[torch.tensor(slots)], **EXACT_FP64)
        place = {slot: row for row, slot in enumerate(slots)}


def test_split_state_keeps_sixteen_bits():
    state = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
    split = split_state(state)
    assert split.shape == (2, 3, 2, 8, 16)
    assert split.dtype == torch.bfloat16
    assert ((merge_state(split) - state).abs() <= state.abs() * 2**-16).all()
    assert ((split[:, :, 0].float() - state).abs() > state.abs() * 2**-12).any()
