"""Linear maps in 8 bits: the kernel against the reference, and the reference against fp32."""

from __future__ import annotations

import pytest
import torch

from onela.errors import DtypeError, ShapeError
from onela.ops.linear import FLOAT8, float8_linear, float8_linear_ref, quantize_rows_ref

pytest.importorskip("triton")
from onela.ops.linear.kernels import MAX_ROW, quantize_rows_triton
from tests.ops.compile_only import resources

SHAPES = [(0, 16), (1, 1), (3, 48), (5, 129), (2, 4097)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_as_the_reference_does(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape[0], shape[1] + 3).to(device, dtype)[:, : shape[1]]
    x[:1] = 0
    values, scales = quantize_rows_triton(x)
    expected, wanted = quantize_rows_ref(x)
    assert values.dtype == FLOAT8
    torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)
    # One unit of float8 where a quotient lies on the border between two.
    difference = (values.float() - expected.float()).abs()
    if device.type == "cpu":  # rounding up to a power of two, the interpreter forgets to carry
        difference[expected.float().abs().log2().frac() == 0] = 0
    assert (difference <= 2**-3 * expected.float().abs() + 2**-9).all()
    assert (difference > 0).sum() <= difference.numel() // 100


def test_the_reference_is_as_near_as_eight_bits_allow() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 257), torch.randn(65, 257) / 16
    x[4] *= 1000
    have = float8_linear_ref(x, *quantize_rows_ref(weight))
    want = x @ weight.t()
    # Three bits of mantissa on either side, and errors that cancel in the sum.
    error = ((have - want).norm(dim=1) / want.norm(dim=1)).max()
    assert 0.005 < error < 0.06
    exact = torch.randint(-8, 9, (7, 32)).float()
    exact[:, 0] = 7 * 2**6
    assert torch.equal(float8_linear_ref(exact, *quantize_rows_ref(exact)), exact @ exact.t())


def test_padding_and_bad_rows() -> None:
    values, scales = quantize_rows_ref(torch.zeros(2, 4))
    assert torch.equal(scales, torch.ones(2, 1))
    assert not values.float().any()
    bad = torch.ones(2, 4)
    bad[1, 2] = float("nan")
    out = float8_linear_ref(bad, *quantize_rows_ref(torch.ones(3, 4)))
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()
    assert float8_linear(torch.ones(0, 4), *quantize_rows_ref(torch.ones(3, 4))).shape == (0, 3)


def test_nan_and_infinity_stay_visible_in_the_kernel(device: torch.device) -> None:
    x = torch.ones(3, 32, device=device)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    _, scales = quantize_rows_triton(x)
    assert torch.isnan(scales[:2]).all()
    assert torch.isfinite(scales[2]).all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_ref(torch.ones(3, 4))
    with pytest.raises(DtypeError, match=r"weight: expected torch\.float8_e4m3fn, got torch\.float32"):
        float8_linear(torch.ones(1, 4), torch.ones(3, 4), scales)
    with pytest.raises(ShapeError, match=r"x: expected shape \[\*, 4\]"):
        float8_linear(torch.ones(1, 5), weight, scales)
    with pytest.raises(ShapeError, match=r"weight_scales: expected shape \[3, 1\]"):
        float8_linear(torch.ones(1, 4), weight, scales[:2])
    with pytest.raises(DtypeError, match="x"):
        quantize_rows_ref(torch.ones(1, 4, dtype=torch.int32))
    with pytest.raises(ShapeError, match=f"x: rows of at most {MAX_ROW}"):
        quantize_rows_triton(torch.ones(1, MAX_ROW + 1, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16, 16), (33, 1024, 2048), (64, 3584, 1024), (5, 48, 100)], ids=str)
def test_the_scaled_product(shape: tuple[int, int, int]) -> None:
    N, D, size = shape
    torch.manual_seed(0)
    x = torch.randn(N, D, device="cuda").bfloat16()
    weight = quantize_rows_ref(torch.randn(size, D, device="cuda") / D**0.5)
    have, want = float8_linear(x, *weight), float8_linear_ref(x, *weight)
    torch.testing.assert_close(have.float(), want.float(), rtol=2**-6, atol=2**-7)


@pytest.mark.slow
def test_the_kernel_compiles() -> None:
    types = {"p_x": "*bf16", "p_o": "*fp8e4nv", "p_scales": "*fp32"}
    constants = {"LARGEST": 448.0, "BLOCK_D": 4096}
    used = resources("onela.ops.linear.kernels", "quantize_rows_kernel", 90, 4, types, constants)
    assert used[0] == 0
