"""Gate, up and their product in one launch."""

from __future__ import annotations

import pytest
import torch

from onela.errors import ShapeError
from onela.ops.linear import has_joined, linear_swiglu, linear_swiglu_ref
from onela.ops.norm import swiglu_ref
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.linear.joined_hopper import linear_swiglu_hopper

# Rows of x, columns of x, rows of each of the two maps.
SHAPES = [
    (1024, 64, 128),
    (1025, 72, 136),
    (2000, 1024, 3584),
    (1100, 8, 8),
    (1100, 128, 8),
    (4097, 200, 1000),
]


def factors(
    N: int, K: int, D: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(N + K + D)
    x = torch.randn(N, K + 8)[:, :K]
    return x.to(device, dtype), (torch.randn(2 * D, K) * K**-0.5).to(device, dtype)


def test_two_maps_and_their_product(device: torch.device) -> None:
    x, weight = factors(5, 16, 24, device)
    wanted = swiglu_ref(x.float() @ weight.float().t())
    torch.testing.assert_close(linear_swiglu(x, weight).float(), wanted, **ROWS["bf16"])
    assert linear_swiglu(x[:0], weight).shape == (0, 24)
    with pytest.raises(ShapeError, match="weight"):
        linear_swiglu_ref(x, weight[:, :8])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_is_no_farther_from_fp32_than_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("a kernel for Hopper")
    x, weight = factors(*shape, device, dtype)
    assert has_joined(x, weight)
    given = linear_swiglu_hopper(x, weight)
    wanted = swiglu_ref(x.float() @ weight.float().t())
    torch.testing.assert_close(given.float(), wanted, **ROWS["bf16"])
    error, allowed = ((y.float() - wanted).square().mean() for y in (given, linear_swiglu_ref(x, weight)))
    assert error <= allowed
    for _ in range(3):
        assert torch.equal(linear_swiglu_hopper(x, weight), given)
