"""The layer step in one launch against its reference, on the GPU it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.reference import split_state
from tests.ops.gated_delta.scenario import Sizes
from tests.ops.gated_delta.test_layer_step import layer, normal, projections, records
from tests.ops.trees import grow_tree, step_index
from tests.tolerances import LAYER_STEP

pytest.importorskip("triton")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onela.ops.gated_delta._layer_step_hopper_kernel import (
    MINUS_LOG2E,
    scaled_silu,
    scaled_silu_pairs,
    silu_by_tanh,
)
from onela.ops.gated_delta.layer_step import launch_pair
from onela.ops.gated_delta.layer_step_hopper import launch_layer_hopper, supports_layer_hopper
from onela.ops.gated_delta.replay_hopper import HopperConfig

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

WIDTHS = [[3, 37, 33, 70, 9, 31, 64, 5, 6], [1, 2, 300, 1], [5, 5, 64, 65, 129, 128, 40, 33]]
PROMPTS = [1, 2, 0]
LEVELS = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3], [6, 3, 7], [0, None, 5], [None, 1, 2], [8, 0, 1]]


def compare(
    sizes: Sizes,
    level: list[int | None],
    *,
    record_dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    prompts: list[int] | None = None,
    config: HopperConfig | None = None,
    pair_too: bool = False,
    **options: int,
) -> None:
    """One step: outputs and all records, the inputs' record and the untouched slots to the bit."""
    device, bf16 = torch.device("cuda"), torch.bfloat16
    tree = grow_tree(WIDTHS, seed=4)
    given: dict[str, Any] = layer(sizes, bf16, device)
    given["recurrent_state"] = split_state(given["recurrent_state"])
    index, slots = step_index(tree, level, prompts or PROMPTS, device, **options)
    index = {name: tensor.to(index_dtype) for name, tensor in index.items()}
    rows = projections(len(slots), sizes, bf16, device, seed=30)
    old = records(tree.num_slots, sizes, bf16, record_dtype, device)
    # What nobody may read is NaN: only slots that are somebody's ancestors hold numbers.
    read = index["ancestors"][index["ancestors"] >= 0].long().unique()
    for seed, (name, tensor) in enumerate(old.items()):
        values = normal(len(read), *tensor.shape[1:], seed=40 + seed) * (
            0.1 if name == "records_delta" else 1
        )
        tensor[read] = (-values.abs() * 0.3 if name == "records_g" else values).to(device, tensor.dtype)
    mine = {name: tensor.clone() for name, tensor in old.items()}
    pair = {name: tensor.clone() for name, tensor in old.items()}
    wanted = {name: tensor.clone() for name, tensor in old.items()}
    assert supports_layer_hopper(rows["mixed_qkv"], rows["z"], **given, **mine, **index)
    o = launch_layer_hopper(**rows, **given, **mine, **index, config=config)
    expected = gated_delta_layer_step_ref(**rows, **given, **wanted, **index)
    limit = LAYER_STEP["bf16"]
    torch.testing.assert_close(o, expected, **limit)
    assert (o[index["slots"] < 0] == 0).all()
    assert torch.equal(mine["records_x"].isnan(), wanted["records_x"].isnan())
    assert torch.equal(mine["records_x"].nan_to_num(), wanted["records_x"].nan_to_num())
    for name in wanted:
        torch.testing.assert_close(mine[name], wanted[name], **limit, equal_nan=True)
    if not pair_too:
        return
    # Both ways on the GPU round at the same places, and differ in the order of sums alone.
    torch.testing.assert_close(o, launch_pair(**rows, **given, **pair, **index), **limit)
    torch.testing.assert_close(mine["records_k"], pair["records_k"], rtol=2**-7, atol=1e-3, equal_nan=True)


@gluon.jit
def every_silu(p_x, p_tanh, p_single, p_pairs):
    """The three ways of the kernel to SiLU, of 1024 bf16 numbers a program, in fp32."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=LAYOUT)
    x = gl.load(p_x + at)
    gl.store(p_tanh + at, silu_by_tanh(x))
    scaled = x.to(gl.float32) * MINUS_LOG2E
    gl.store(p_single + at, scaled_silu(scaled))
    gl.store(p_pairs + at, scaled_silu_pairs(scaled))


def test_silu_of_every_bf16() -> None:
    """In the convolution exact to fp32's rounding; in the gate without ancestors to the error that is promised."""
    x = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    tanh, single, pairs = (torch.empty(1 << 16, device="cuda") for _ in range(3))
    every_silu[(64,)](x, tanh, single, pairs, num_warps=4)
    near = x.abs() <= 24
    wide = x[near].double()
    exact = wide * torch.sigmoid(wide)
    assert (tanh[near] - exact).abs().max() <= 1.2e-5
    torch.testing.assert_close(single[near].double(), exact, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(pairs[near].double(), exact, rtol=1e-5, atol=1e-30)


# Every depth and pair of head counts is a compilation of its own: most tests share them.
SIZES = Sizes(H=2, HV=4, K=128, V=128)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_ragged_rows_and_depths(level: list[int | None]) -> None:
    pair_too = max(x or 0 for x in level) < 3
    compare(SIZES, level, tail=3, pad_every=7, pair_too=pair_too)


@pytest.mark.parametrize("level", [[1, 1, 1], [4, 3, 5]], ids=str)
def test_records_in_fp32(level: list[int | None]) -> None:
    compare(SIZES, level, record_dtype=torch.float32, pad_every=5)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_cuts(splits: int) -> None:
    compare(SIZES, [2, 2, 2], config=HopperConfig(splits=splits, ring=5), tail=1)
    config = HopperConfig(splits=splits, ring=4, overlap=False)
    compare(SIZES, [0, 0, 0], config=config, tail=40)


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (16, 16), (4, 16)])
def test_heads(H: int, HV: int) -> None:
    compare(Sizes(H=H, HV=HV, K=128, V=128), [2, 2, 1])


def test_more_columns_than_depth() -> None:
    compare(SIZES, [2, 1, 0], extra_depth=3)


def test_long_indices() -> None:
    compare(SIZES, [3, 3, 3], index_dtype=torch.int64)


def test_prompt_pad_and_all_padding() -> None:
    compare(SIZES, [2, 2, 2], prompts=[1, -1, 0])
    compare(SIZES, [None, None, None], tail=70)


def test_what_it_leaves_to_the_pair() -> None:
    device, bf16 = torch.device("cuda"), torch.bfloat16
    tree = grow_tree(WIDTHS, seed=4)
    index, slots = step_index(tree, [1, 1, 1], PROMPTS, device)
    for sizes, dtype, split in (
        (Sizes(H=1, HV=2, K=128, V=256), bf16, True),
        (Sizes(H=1, HV=2, K=128, V=128), bf16, False),
        (Sizes(H=1, HV=2, K=128, V=128), torch.float16, True),
    ):
        given: dict[str, Any] = layer(sizes, dtype, device)
        if split:
            given["recurrent_state"] = split_state(given["recurrent_state"])
        rows = projections(len(slots), sizes, dtype, device, seed=30)
        kept = records(tree.num_slots, sizes, dtype, bf16, device)
        assert not supports_layer_hopper(rows["mixed_qkv"], rows["z"], **given, **kept, **index)
