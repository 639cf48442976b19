"""The fused layer step against its reference, over whole decodes: each step reads what the earlier ones wrote."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.gated_delta.layer_step import gated_delta_layer_step_triton
from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.reference import split_state
from onela.ops.indexing import PAD
from tests.ops.gated_delta.scenario import Sizes, random_state
from tests.ops.trees import grow_tree, step_index
from tests.tolerances import LAYER_STEP

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

WIDTHS = [[3, 20, 17, 5, 8], [1, 2], [5, 5, 33, 4, 4]]
PROMPTS = [1, 2, 0]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(sizes: Sizes, dtype: torch.dtype, device: torch.device, *, kernel_size: int = 4) -> dict:
    """Weights and prompt states of one layer; gates in fp32, as checkpoints keep them."""
    channels = 2 * sizes.H * sizes.K + sizes.HV * sizes.V
    tensors = {
        "conv_weight": normal(channels, kernel_size, seed=20, dtype=dtype) * 0.4,
        "A_log": normal(sizes.HV, seed=21),
        "dt_bias": normal(sizes.HV, seed=22),
        "norm_weight": 1 + 0.2 * normal(sizes.V, seed=23, dtype=dtype),
        "conv_state": normal(3, channels, kernel_size - 1, seed=24, dtype=dtype),
        "recurrent_state": random_state(3, sizes, torch.float32, "cpu"),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"norm_eps": 1e-6}


def projections(
    n: int, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Slices of one fused projection, as a layer hands them over: rows are strided, by a multiple of 16 elements."""
    qkv, gate = 2 * sizes.H * sizes.K + sizes.HV * sizes.V, sizes.HV * sizes.V
    used = qkv + gate + 2 * sizes.HV
    fused = torch.nn.functional.pad(normal(n, used, seed=seed, dtype=dtype).to(device), (0, -used % 16))
    parts = fused[:, :used].split([qkv, gate, sizes.HV, sizes.HV], dim=1)
    return dict(zip(("mixed_qkv", "z", "b", "a"), parts))


def records(
    num_slots: int, sizes: Sizes, dtype: torch.dtype, record_dtype: torch.dtype, device
) -> dict[str, Tensor]:
    channels = 2 * sizes.H * sizes.K + sizes.HV * sizes.V
    shapes = {
        "records_g": ((num_slots, sizes.HV), torch.float32),
        "records_delta": ((num_slots, sizes.HV, sizes.V), record_dtype),
        "records_k": ((num_slots, sizes.H, sizes.K), dtype),
        "records_x": ((num_slots, channels), dtype),
    }
    return {
        name: torch.full(shape, float("nan"), dtype=d, device=device) for name, (shape, d) in shapes.items()
    }


def compare(
    sizes: Sizes,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    record_dtype: torch.dtype = torch.float32,
    steps: int = 2,
    kernel_size: int = 4,
    split: bool = False,
    widths: list[list[int]] = WIDTHS,
    **options: int,
) -> None:
    """Decode with both; each step's outputs and all records are compared, and the reference's records go on."""
    tree = grow_tree(widths, seed=4)
    given = layer(sizes, dtype, device, kernel_size=kernel_size)
    if split:
        given["recurrent_state"] = split_state(given["recurrent_state"])
    wanted = records(tree.num_slots, sizes, dtype, record_dtype, device)
    if "pad_every" in options:
        # Children of padding rows read what nobody wrote.
        wanted = {name: normal(*x.shape, seed=40, dtype=x.dtype).to(device) for name, x in wanted.items()}
    limit = LAYER_STEP["fp32" if dtype == torch.float32 else "bf16"]
    for step in range(steps):
        level = [s if 0 <= s < len(w) else None for s, w in zip((step, step - 1, step), widths)]
        index, slots = step_index(tree, level, PROMPTS, device, **options)
        rows = projections(len(slots), sizes, dtype, device, seed=30 + step)
        mine = {name: tensor.clone() for name, tensor in wanted.items()}
        o_ref = gated_delta_layer_step_ref(**rows, **given, **wanted, **index)
        o = gated_delta_layer_step_triton(**rows, **given, **mine, **index)
        assert o.dtype == dtype
        assert o.shape == (len(slots), sizes.HV * sizes.V)
        torch.testing.assert_close(o, o_ref, **limit)
        assert (o[index["slots"] < 0] == 0).all()
        for name in wanted:
            torch.testing.assert_close(mine[name], wanted[name], **limit, equal_nan=True)


def test_whole_decode(device):
    """Windows wholly in the prompt, across its end, and wholly among ancestors."""
    compare(Sizes(H=1, HV=2, K=32, V=32), device, steps=5)


@pytest.mark.parametrize("record_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
def test_bf16(record_dtype, split, device):
    compare(
        Sizes(H=1, HV=2, K=32, V=32), device, dtype=torch.bfloat16, record_dtype=record_dtype, split=split
    )


@pytest.mark.parametrize(
    ("H", "HV", "K", "V"), [(2, 4, 32, 64), (1, 1, 64, 32), (3, 3, 16, 16), (1, 2, 128, 256)]
)
def test_geometries(H, HV, K, V, device):
    compare(Sizes(H=H, HV=HV, K=K, V=V), device, widths=[[3, 5], [1, 2], [2, 2]])


def test_sizes_of_released_models(device):
    """Where there is a Hopper GPU, its kernel takes the second launch of these."""
    sizes = Sizes(H=1, HV=2, K=128, V=128)
    compare(
        sizes,
        device,
        dtype=torch.bfloat16,
        record_dtype=torch.bfloat16,
        split=True,
        steps=3,
        widths=[[3, 9, 5]] * 3,
    )


def test_padding_and_rows_behind_the_last_request(device):
    compare(Sizes(H=1, HV=2, K=32, V=32), device, steps=3, tail=5, pad_every=3, extra_depth=2)


@pytest.mark.parametrize("kernel_size", [2, 3])
def test_other_kernel_sizes(kernel_size, device):
    compare(
        Sizes(H=1, HV=1, K=32, V=32),
        device,
        steps=3,
        kernel_size=kernel_size,
        widths=[[3, 5, 4], [2], [2, 2, 2]],
    )


def test_a_request_without_a_prompt_and_an_empty_batch(device):
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    tree = grow_tree(WIDTHS, seed=4)
    given = layer(sizes, torch.float32, device)
    for level, prompts in (([0, 0, 0], [PAD, 2, PAD]), ([None, None, None], PROMPTS)):
        index, slots = step_index(tree, level, prompts, device)
        kept = records(tree.num_slots, sizes, torch.float32, torch.float32, device)
        o = gated_delta_layer_step_triton(
            **projections(len(slots), sizes, torch.float32, device, 30), **given, **kept, **index
        )
        if slots:
            assert (o[:3] == 0).all()
            assert (o[3:4] != 0).any()
            assert (o[4:] == 0).all()
            assert kept["records_x"].isfinite().all(-1).sum() == 1
        else:
            assert o.shape == (0, sizes.HV * sizes.V)


def test_refusals(device):
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    tree = grow_tree(WIDTHS, seed=4)
    index, slots = step_index(tree, [1, 1, 1], PROMPTS, device)
    good = {
        **projections(len(slots), sizes, torch.bfloat16, device, 30),
        **layer(sizes, torch.bfloat16, device),
        **records(tree.num_slots, sizes, torch.bfloat16, torch.bfloat16, device),
        **index,
    }

    def refused(error: type[Exception], match: str, **changed: Tensor) -> None:
        with pytest.raises(error, match=match):
            gated_delta_layer_step_triton(**(good | changed))

    refused(ShapeError, "mixed_qkv", mixed_qkv=good["mixed_qkv"][:, 1:])
    refused(ShapeError, "conv_state", conv_state=good["conv_state"][..., 1:])
    refused(ShapeError, "norm_weight", norm_weight=good["norm_weight"][1:])
    refused(ShapeError, "depths", depths=good["depths"][1:])
    refused(DtypeError, "records_x: expected mixed_qkv's", records_x=good["records_x"].float())
    refused(DtypeError, "slots", slots=good["slots"].float())
