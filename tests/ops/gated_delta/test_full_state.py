"""The FullState baseline against its reference: in place, reading the parent's row, and the copy between pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.gated_delta.full_state import full_state_step_triton, reorder_states
from onela.ops.gated_delta.reference import full_state_step_ref
from onela.ops.indexing import PAD
from tests.ops.gated_delta.scenario import Sizes, random_rows, random_state
from tests.ops.trees import int32
from tests.tolerances import REPLAY


def step(
    device: torch.device,
    read: list[int],
    write: list[int],
    *,
    sizes: Sizes,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Run both from the same states; compare outputs and the whole pool; return the kernel's."""
    rows = random_rows(len(read), sizes, dtype, device)
    index = {
        "read_rows": int32(read, device),
        "write_rows": int32(write, device),
        "row_prompts": int32([n % 2 for n in range(len(read))], device),
    }
    prompts = random_state(2, sizes, torch.float32, device)
    wanted = random_state(9, sizes, state_dtype, device, seed=5)
    given = wanted.clone()
    o_ref = full_state_step_ref(
        **rows, states=wanted, recurrent_state=prompts, **index, out_dtype=torch.float32, **options
    )
    o = full_state_step_triton(
        **rows, states=given, recurrent_state=prompts, **index, out_dtype=torch.float32, **options
    )
    torch.testing.assert_close(o, o_ref, **REPLAY["fp32"])
    torch.testing.assert_close(given, wanted, **REPLAY["bf16" if state_dtype == torch.bfloat16 else "fp32"])
    return o, given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("read", "write"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),  # in place
        ([1, 1, 0, 1], [4, 5, 6, 7]),  # repeated parents
        ([PAD, PAD, PAD], [8, 3, 0]),  # from the prompts
        ([2, PAD, 1, 3], [PAD, 5, 1, PAD]),  # padding rows
    ],
)
def test_step(dtype, state_dtype, read, write, device):
    o, _ = step(device, read, write, sizes=Sizes(H=1, HV=2, K=32, V=32), dtype=dtype, state_dtype=state_dtype)
    for n, row in enumerate(write):
        assert bool((o[n] == 0).all()) == (row == PAD)


@pytest.mark.parametrize(
    ("H", "HV", "K", "V"),
    [(1, 1, 128, 128), (1, 3, 64, 16), (2, 4, 16, 128), (1, 1, 256, 32), (1, 1, 512, 16)],
)
def test_geometries(H, HV, K, V, device):
    step(device, [0, 3], [0, 1], sizes=Sizes(H=H, HV=HV, K=K, V=V))


def test_scale(device):
    sizes = Sizes(H=1, HV=1, K=64, V=32)
    o, _ = step(device, [0], [1], sizes=sizes)
    twice, _ = step(device, [0], [1], sizes=sizes, scale=2 * 64**-0.5)
    torch.testing.assert_close(twice, 2 * o, **REPLAY["fp32"])


def test_empty(device):
    o, _ = step(device, [], [], sizes=Sizes(H=1, HV=2, K=32, V=32))
    assert o.shape == (0, 2, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 2, 32, 16), (6, 3, 5, 7), (6, 9001)])
def test_reorder(dtype, shape, device):
    states = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.full((7, *shape[1:]), 7.0, dtype=dtype, device=device)
    parents = [3, 3, PAD, 0, 5]
    assert reorder_states(states, int32(parents, device), out=out) is out
    for n in range(7):
        parent = parents[n] if n < len(parents) else PAD
        assert torch.equal(out[n], torch.full_like(out[n], 7.0) if parent == PAD else states[parent])


def test_refusals(device):
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    rows = random_rows(2, sizes, torch.bfloat16, device)
    states = random_state(3, sizes, torch.float32, device)
    index = {name: int32([0, 1], device) for name in ("read_rows", "write_rows", "row_prompts")}
    good = {**rows, "states": states, "recurrent_state": states, **index}
    for error, match, changed in (
        (ShapeError, "read_rows", {"read_rows": int32([0], device)}),
        (ShapeError, "states: expected a contiguous", {"states": states.transpose(2, 3)}),
        (ShapeError, "recurrent_state", {"recurrent_state": states[..., :16]}),
        (DtypeError, "write_rows", {"write_rows": index["write_rows"].float()}),
        (DtypeError, "states", {"states": states.double()}),
    ):
        with pytest.raises(error, match=match):
            full_state_step_triton(**(good | changed))
    with pytest.raises(DtypeError, match="out: expected"):
        reorder_states(states, index["read_rows"], out=states.bfloat16())
    with pytest.raises(ShapeError, match="out: expected"):
        reorder_states(states, index["read_rows"], out=states[:1].clone())
