"""Linear maps in 8 bits: the kernel against the reference, and the reference against fp32."""

from __future__ import annotations

import pytest
import torch

from onela.errors import DtypeError, ShapeError
from onela.ops.linear import (
    FLOAT8,
    float8_linear,
    float8_linear_ref,
    quantize_rows_ref,
    rms_norm_float8_ref,
    swiglu_float8_ref,
)

pytest.importorskip("triton")
from onela.ops.linear.kernels import (
    MAX_ROW,
    quantize_rows_triton,
    rms_norm_float8_triton,
    swiglu_float8_triton,
)
from tests.ops.compile_only import resources

SHAPES = [(0, 16), (1, 1), (3, 48), (5, 129), (2, 4097)]
DTYPES = [torch.float32, torch.bfloat16]


def check(given: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same scales, and values that are one unit of float8 apart where a quotient lies on the border."""
    (values, scales), (wanted, wanted_scales) = given, expected
    assert values.dtype == FLOAT8
    assert values.is_contiguous()
    # A bf16 result may be rounded the other way where sums run in another order; the interpreter truncates, and in
    # float8 it forgets to carry when it rounds up to a power of two.
    torch.testing.assert_close(scales, wanted_scales, rtol=2**-6, atol=0)
    difference = (values.float() - wanted.float()).abs()
    far = difference > 2**-3 * wanted.float().abs() + 2**-9
    if values.device.type == "cuda":
        assert not far.any()
        assert (difference > 0).sum() <= max(1, difference.numel() // 20)
    else:
        assert far.sum() <= max(2, far.numel() // 10)


def strided(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    torch.manual_seed(rows + size)
    x = torch.randn(rows, size + 3).to(device, dtype)[:, :size]
    x[:1] = 0
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_as_the_reference_does(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x = strided(*shape, dtype, device)
    check(quantize_rows_triton(x), quantize_rows_ref(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("residual", [None, torch.float32], ids=str)
def test_a_norm_rounds_its_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    zero_centered: bool,
    residual: torch.dtype | None,
    device: torch.device,
) -> None:
    x, weight = strided(*shape, dtype, device), torch.randn(shape[1]).to(device, dtype)
    sums = [None, None] if residual is None else [torch.randn(shape).to(device, residual)] * 2
    sums = [None if one is None else one.clone() for one in sums]
    options = {"eps": 1e-6, "zero_centered": zero_centered}
    given = rms_norm_float8_triton(x, weight, residual=sums[0], **options)
    check(given, rms_norm_float8_ref(x, weight, residual=sums[1], **options))
    if sums[0] is not None and sums[1] is not None:
        torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_rounds_its_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = strided(shape[0], 2 * shape[1], dtype, device)
    check(swiglu_float8_triton(gate_up), swiglu_float8_ref(gate_up))


def product(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A linear map of rows that are rounded first."""
    return float8_linear_ref(*quantize_rows_ref(x), *weight, out_dtype=x.dtype)


def test_the_reference_is_as_near_as_eight_bits_allow() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 257), torch.randn(65, 257) / 16
    x[4] *= 1000
    have = product(x, quantize_rows_ref(weight))
    want = x @ weight.t()
    # Three bits of mantissa on either side, and errors that cancel in the sum.
    error = ((have - want).norm(dim=1) / want.norm(dim=1)).max()
    assert 0.005 < error < 0.06
    exact = torch.randint(-8, 9, (7, 32)).float()
    exact[:, 0] = 7 * 2**6
    assert torch.equal(product(exact, quantize_rows_ref(exact)), exact @ exact.t())


def test_padding_and_bad_rows() -> None:
    values, scales = quantize_rows_ref(torch.zeros(2, 4))
    assert torch.equal(scales, torch.ones(2, 1))
    assert not values.float().any()
    bad = torch.ones(2, 4)
    bad[1, 2] = float("nan")
    out = product(bad, quantize_rows_ref(torch.ones(3, 4)))
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()
    assert product(torch.ones(0, 4), quantize_rows_ref(torch.ones(3, 4))).shape == (0, 3)


def test_nan_and_infinity_stay_visible_in_the_kernel(device: torch.device) -> None:
    x = torch.ones(3, 32, device=device)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    _, scales = quantize_rows_triton(x)
    assert torch.isnan(scales[:2]).all()
    assert torch.isfinite(scales[2]).all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_ref(torch.ones(3, 4))
    x, x_scales = quantize_rows_ref(torch.ones(1, 4))

    def call(*factors: torch.Tensor) -> None:
        float8_linear(*factors, out_dtype=torch.float32)

    with pytest.raises(DtypeError, match=r"weight: expected torch\.float8_e4m3fn, got torch\.float32"):
        call(x, x_scales, torch.ones(3, 4), scales)
    with pytest.raises(DtypeError, match=r"x: expected torch\.float8_e4m3fn, got torch\.float32"):
        call(torch.ones(1, 4), x_scales, weight, scales)
    with pytest.raises(ShapeError, match=r"x: expected shape \[\*, 4\]"):
        call(*quantize_rows_ref(torch.ones(1, 5)), weight, scales)
    with pytest.raises(ShapeError, match=r"weight_scales: expected shape \[3, 1\]"):
        call(x, x_scales, weight, scales[:2])
    with pytest.raises(ShapeError, match=r"x_scales: expected shape \[1, 1\]"):
        call(x, x_scales[:0], weight, scales)
    with pytest.raises(DtypeError, match="x"):
        quantize_rows_ref(torch.ones(1, 4, dtype=torch.int32))
    with pytest.raises(ShapeError, match=f"x: rows of at most {MAX_ROW}"):
        quantize_rows_triton(torch.ones(1, MAX_ROW + 1, device=device))
    with pytest.raises(ShapeError, match=r"x: expected shape \[\*, 5\]"):
        rms_norm_float8_triton(torch.ones(1, 4, device=device), torch.ones(5, device=device), eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16, 16), (33, 1024, 2048), (64, 3584, 1024), (5, 48, 100)], ids=str)
def test_the_scaled_product(shape: tuple[int, int, int]) -> None:
    N, D, size = shape
    torch.manual_seed(0)
    rows = quantize_rows_ref(torch.randn(N, D, device="cuda").bfloat16())
    weight = quantize_rows_ref(torch.randn(size, D, device="cuda") / D**0.5)
    have = float8_linear(*rows, *weight, out_dtype=torch.bfloat16)
    want = float8_linear_ref(*rows, *weight, out_dtype=torch.bfloat16)
    torch.testing.assert_close(have.float(), want.float(), rtol=2**-6, atol=2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantize_rows", "rms_norm_float8", "swiglu_float8"])
def test_the_kernels_compile(name: str) -> None:
    types = dict.fromkeys(("p_x", "p_weight"), "*bf16") | {
        "p_o": "*fp8e4nv",
        "p_scales": "*fp32",
        "eps": "fp32",
    }
    types["p_residual"] = "*fp32"
    constants: dict[str, object] = {"LARGEST": 448.0, "BLOCK_D": 4096}
    if name == "rms_norm_float8":
        constants |= {"CENTERED": True, "RESIDUAL": True}
    used = resources("onela.ops.linear.kernels", f"{name}_kernel", 90, 8, types, constants)
    assert used[0] == 0
