"""The fused norm and rotation of queries and keys against its reference."""

from __future__ import annotations

import pytest
import torch

from onela.errors import ShapeError
from onela.ops.norm import qk_norm_rotary_ref
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.norm.qk_kernel import qk_norm_rotary_triton


def make_case(
    T: int, HQ: int, HKV: int, D: int, R: int, device: torch.device, dtype: torch.dtype = torch.float32
):
    """Heads of q lie beside their gates, as in the models' projection: they are strided."""
    generator = torch.Generator().manual_seed(T + D)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(T, HQ, 2 * D).to(dtype).to(device)[..., :D]
    k = normal(T, HKV, D).to(dtype).to(device)
    angles = normal(T, R // 2)
    return (q, k), {
        "q_weight": normal(D).to(dtype).to(device),
        "k_weight": normal(D).to(dtype).to(device),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "eps": 1e-6,
    }


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize(
    ("T", "HQ", "HKV", "D", "R"), [(5, 8, 2, 256, 64), (1, 3, 1, 24, 24), (3, 4, 4, 16, 2), (0, 2, 1, 8, 4)]
)
def test_equals_the_reference(T, HQ, HKV, D, R, zero_centered, device):
    qk, options = make_case(T, HQ, HKV, D, R, device)
    expected = qk_norm_rotary_ref(*qk, **options, zero_centered=zero_centered)
    got = qk_norm_rotary_triton(*qk, **options, zero_centered=zero_centered)
    for want, have in zip(expected, got):
        assert have.is_contiguous()
        torch.testing.assert_close(have, want, **ROWS["fp32"])


@pytest.mark.gpu
def test_half_precision(device):
    qk, options = make_case(1000, 8, 2, 256, 64, device, torch.bfloat16)
    for want, have in zip(qk_norm_rotary_ref(*qk, **options), qk_norm_rotary_triton(*qk, **options)):
        torch.testing.assert_close(have, want, **ROWS["bf16"])


def test_refuses_wrong_shapes(device):
    (q, k), options = make_case(2, 2, 1, 8, 4, device)
    with pytest.raises(ShapeError, match="k_weight"):
        qk_norm_rotary_triton(q, k, **(options | {"k_weight": options["k_weight"][1:]}))
    with pytest.raises(ShapeError, match="cos"):
        qk_norm_rotary_triton(q, k, **(options | {"cos": options["cos"][:1]}))
