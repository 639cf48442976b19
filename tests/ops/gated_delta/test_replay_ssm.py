"""The ReplaySSM baseline against its reference: checkpoints per beam and shared, buffers of every depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.gated_delta.reference import replay_ssm_step_ref
from onela.ops.gated_delta.replay_ssm import replay_ssm_step_triton
from onela.ops.indexing import PAD
from tests.ops.gated_delta.scenario import Sizes, random_rows, random_state
from tests.ops.trees import int32
from tests.tolerances import REPLAY

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

TRANSITIONS = 4


def buffers(sizes: Sizes, dtype: torch.dtype, device: torch.device, rows: int = 6) -> dict[str, Tensor]:
    """Buffers of `rows` beams, plausible transitions everywhere."""
    filled = random_rows(rows * TRANSITIONS, sizes, torch.float32, device, seed=9)
    return {
        "buffer_g": filled["g"].unflatten(0, (rows, TRANSITIONS)),
        "buffer_delta": (0.05 * filled["v"]).to(dtype).unflatten(0, (rows, TRANSITIONS)),
        "buffer_k": filled["k"].to(dtype).unflatten(0, (rows, TRANSITIONS)),
    }


def step(
    device: torch.device,
    rows: list[int],
    checkpoint_rows: list[int],
    depths: list[int],
    *,
    sizes: Sizes,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run both from the same buffers; compare outputs and whole buffers; return the kernel's output."""
    given = random_rows(len(rows), sizes, dtype, device)
    index = {
        "rows": int32(rows, device),
        "row_depths": int32(depths, device),
        "checkpoint_rows": int32(checkpoint_rows, device),
    }
    checkpoints = random_state(6, sizes, state_dtype, device)
    wanted = buffers(sizes, dtype, device)
    mine = {name: tensor.clone() for name, tensor in wanted.items()}
    common = {"checkpoints": checkpoints, **index, "out_dtype": torch.float32}
    o_ref = replay_ssm_step_ref(**given, **wanted, **common)
    o = replay_ssm_step_triton(**given, **mine, **common)
    torch.testing.assert_close(o, o_ref, **REPLAY["fp32"])
    for name in wanted:
        limit = REPLAY["bf16" if wanted[name].dtype == torch.bfloat16 else "fp32"]
        torch.testing.assert_close(mine[name], wanted[name], **limit)
    return o


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "checkpoint_rows", "depths"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),  # a checkpoint for each
        ([5, 0, 2], [1, 1, 1], [1, 1, 1]),  # shared
        ([PAD, 4, PAD], [0, 0, 0], [0, 3, 2]),  # padding rows
    ],
)
def test_step(dtype, state_dtype, rows, checkpoint_rows, depths, device):
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    o = step(device, rows, checkpoint_rows, depths, sizes=sizes, dtype=dtype, state_dtype=state_dtype)
    for n, row in enumerate(rows):
        assert bool((o[n] == 0).all()) == (row == PAD)


@pytest.mark.parametrize(
    ("H", "HV", "K", "V"),
    [(1, 1, 128, 128), (1, 3, 64, 16), (2, 4, 16, 128), (1, 1, 256, 32), (1, 1, 512, 16)],
)
def test_geometries(H, HV, K, V, device):
    step(device, [0, 3], [1, 1], [2, 1], sizes=Sizes(H=H, HV=HV, K=K, V=V))


def test_empty(device):
    assert step(device, [], [], [], sizes=Sizes(H=1, HV=2, K=32, V=32)).shape == (0, 2, 32)


def test_refusals(device):
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    good = {
        **random_rows(2, sizes, torch.bfloat16, device),
        **buffers(sizes, torch.bfloat16, device),
        "checkpoints": random_state(2, sizes, torch.float32, device),
        **{name: int32([0, 1], device) for name in ("rows", "row_depths", "checkpoint_rows")},
    }
    for error, match, changed in (
        (ShapeError, "rows", {"rows": int32([0], device)}),
        (ShapeError, "buffer_k", {"buffer_k": good["buffer_k"][:, 1:]}),
        (
            ShapeError,
            "buffer_delta: expected a contiguous",
            {"buffer_delta": good["buffer_delta"].mT.contiguous().mT},
        ),
        (DtypeError, "row_depths", {"row_depths": good["row_depths"].float()}),
        (DtypeError, "checkpoints", {"checkpoints": good["checkpoints"].double()}),
    ):
        with pytest.raises(error, match=match):
            replay_ssm_step_triton(**(good | changed))
