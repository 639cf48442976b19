"""The gates' kernel against the reference, over slices of a fused projection."""

from __future__ import annotations

import pytest
import torch

from onela.ops.gated_delta.reference import gated_delta_gates
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.gated_delta.gates import gated_delta_gates_triton


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 3), (300, 16)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "round_beta"), [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_gates_equal_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, round_beta: bool, device: torch.device
) -> None:
    N, HV = shape
    fused = (8 * torch.randn(N, 2 * HV + 5)).to(device, dtype)
    a, b = fused[:, 1 : 1 + HV], fused[:, HV + 3 : 2 * HV + 3]
    weights = {"A_log": torch.randn(HV, device=device), "dt_bias": torch.randn(HV, device=device)}
    given, expected = (
        gates(a, b, **weights, round_beta=round_beta)
        for gates in (gated_delta_gates_triton, gated_delta_gates)
    )
    torch.testing.assert_close(given[0], expected[0], **ROWS["fp32"])
    torch.testing.assert_close(given[1], expected[1], **ROWS["bf16" if round_beta else "fp32"])
    assert given[1].dtype == torch.float32
    assert torch.equal(given[1], given[1].to(dtype).float()) == (
        round_beta or dtype == torch.float32 or N == 0
    )
