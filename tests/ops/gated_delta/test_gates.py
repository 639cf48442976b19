"""The gates' kernel against the reference, over slices of a fused projection."""

from __future__ import annotations

import pytest
import torch

from onela.ops.gated_delta.reference import gated_delta_gates
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.gated_delta.gates import gated_delta_gates_triton


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 3), (300, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    N, HV = shape
    fused = (8 * torch.randn(N, 2 * HV + 5)).to(device, dtype)
    a, b = fused[:, 1 : 1 + HV], fused[:, HV + 3 : 2 * HV + 3]
    weights = {"A_log": torch.randn(HV, device=device), "dt_bias": torch.randn(HV, device=device)}
    for given, expected in zip(gated_delta_gates_triton(a, b, **weights), gated_delta_gates(a, b, **weights)):
        torch.testing.assert_close(given, expected, **ROWS["fp32"])
