"""The short convolution against torch's own, and a step against the whole path of a beam."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from onela.ops.short_conv import short_conv_prefill, short_conv_step
from tests.ops.trees import SHAPES, random_tree
from tests.tolerances import EXACT_FP64

C = 10


def whole(x: torch.Tensor, weight: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """One sequence [T, C] after its past [C, kernel_size - 1], by torch."""
    joined = torch.cat([past, x.t()], dim=1)
    return F.silu(F.conv1d(joined[None], weight[:, None], groups=weight.shape[0])[0].t())


@pytest.mark.parametrize("lengths", [[], [1], [2, 3], [0, 7, 0, 1], [5, 90]])
@pytest.mark.parametrize("kernel_size", [2, 4])
def test_prefill_equals_torch_on_each_sequence(lengths: list[int], kernel_size: int) -> None:
    weight = torch.randn(C, kernel_size, dtype=torch.float64)
    x = torch.randn(sum(lengths), C, dtype=torch.float64)
    past = torch.randn(len(lengths), C, kernel_size - 1, dtype=torch.float64)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    y, tail = short_conv_prefill(
        x, weight, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), initial_state=past
    )
    assert (y.shape, tail.shape) == (x.shape, past.shape)
    for n, length in enumerate(lengths):
        part = x[bounds[n] : bounds[n + 1]]
        if length:
            torch.testing.assert_close(
                y[bounds[n] : bounds[n + 1]], whole(part, weight, past[n]), **EXACT_FP64
            )
        assert torch.equal(tail[n], torch.cat([past[n], part.t()], dim=1)[:, -(kernel_size - 1) :])


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("kernel_size", [2, 4])
def test_a_step_equals_the_path_of_its_beam(widths: list[list[int]], kernel_size: int) -> None:
    tree = random_tree(widths, dead=0.2)
    weight = torch.randn(C, kernel_size, dtype=torch.float64)
    inputs = torch.randn(tree.num_slots, C, dtype=torch.float64)
    conv_state = torch.randn(len(widths), C, kernel_size - 1, dtype=torch.float64)
    own = [path[-1] if path else -1 for path in tree.paths]
    x = torch.stack([inputs[slot] if slot >= 0 else torch.full((C,), torch.nan) for slot in own])
    records = inputs.clone()
    # What this step is to write is not there yet.
    records[[slot for slot in own if slot >= 0]] = torch.nan
    x = torch.nan_to_num(x)
    y = short_conv_step(x, weight, conv_state=conv_state, records_x=records, **tree.index)
    for row, path in enumerate(tree.paths):
        if path is None:
            assert not y[row].any()
            continue
        expected = whole(inputs[path], weight, conv_state[tree.request_of[row]])[-1]
        torch.testing.assert_close(y[row], expected, **EXACT_FP64)
        assert torch.equal(records[path[-1]], x[row])


class _Heap(ctypes.Structure):
    """What `mallinfo2` returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def test_nothing_is_kept_for_a_length_that_has_been() -> None:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library does not say what is allocated")
    mallinfo.restype = _Heap
    weight = torch.randn(256, 4)

    def run(lengths: range) -> None:
        for length in lengths:
            short_conv_prefill(torch.zeros(length, 256), weight, cu_seqlens=torch.tensor([0, length]))

    run(range(150, 160))
    before = mallinfo().uordblks
    run(range(8, 150))
    assert mallinfo().uordblks - before < 1 << 20


def test_the_sum_is_rounded_when_asked_for() -> None:
    """As a convolution in bf16 and a SiLU in bf16, one after the other; else only the SiLU is rounded."""
    x, weight = torch.randn(40, C).bfloat16(), torch.randn(C, 4).bfloat16()
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    sums = F.conv1d(x.double().t()[None], weight.double()[:, None], padding=3, groups=C)[0, :, :40].t()
    for round_sum, expected in ((False, F.silu(sums)), (True, F.silu(sums.bfloat16().double()))):
        y = short_conv_prefill(x, weight, cu_seqlens=bounds, round_sum=round_sum)[0]
        assert torch.equal(y, expected.bfloat16())
    assert not torch.equal(F.silu(sums).bfloat16(), F.silu(sums.bfloat16()))
