"""The row-wise kernels against their references, over strided rows and sizes that are no powers of two."""

from __future__ import annotations

import pytest
import torch

from onela.ops.norm import (
    gated_rms_norm_ref,
    rms_norm_ref,
    rotary_angles_ref,
    rotary_ref,
    sigmoid_gate_ref,
    swiglu_ref,
)
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.norm.kernels import (
    gated_rms_norm_triton,
    rms_norm_triton,
    rotary_angles_triton,
    rotary_triton,
    sigmoid_gate_triton,
    swiglu_triton,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 8), (1, 1), (3, 48), (70, 1024), (2, 3, 24), (33, 2, 129)]


def draw(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def strided(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A slice of a wider tensor: what a fused projection hands on."""
    return draw(*shape[:-1], 2 * shape[-1] + 3, dtype=dtype, device=device)[..., 1 : 1 + shape[-1]]


def check(given: torch.Tensor, expected: torch.Tensor) -> None:
    assert given.dtype == expected.dtype
    assert given.is_contiguous()
    torch.testing.assert_close(given, expected, **ROWS["fp32" if given.dtype == torch.float32 else "bf16"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(
    shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool, device: torch.device
) -> None:
    x, weight = strided(shape, dtype, device), draw(shape[-1], dtype=dtype, device=device)
    options = {"eps": 1e-6, "zero_centered": zero_centered}
    check(rms_norm_triton(x, weight, **options), rms_norm_ref(x, weight, **options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False])
def test_rms_norm_adds_to_the_residual_first(
    shape: tuple[int, ...], dtype: torch.dtype, wide: bool, device: torch.device
) -> None:
    x, weight = strided(shape, dtype, device), draw(shape[-1], dtype=dtype, device=device)
    stream = torch.float32 if wide else dtype
    own, expected = (draw(*shape, dtype=stream, device=device) for _ in range(2))
    expected.copy_(own)
    given = rms_norm_triton(x, weight, eps=1e-5, residual=own)
    wanted = rms_norm_ref(x, weight, eps=1e-5, residual=expected)
    check(own, expected)
    check(given, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False])
def test_gated_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, wide: bool, device: torch.device) -> None:
    x = draw(*shape, dtype=torch.float32 if wide else dtype, device=device)
    gate, weight = strided(shape, dtype, device), draw(shape[-1], dtype=dtype, device=device)
    check(gated_rms_norm_triton(x, gate, weight, eps=1e-6), gated_rms_norm_ref(x, gate, weight, eps=1e-6))


@pytest.mark.parametrize(
    ("shape", "half"), [((0, 2, 8), 2), ((1, 1, 2), 1), ((5, 3, 24), 6), ((70, 2, 128), 64)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(shape: tuple[int, ...], half: int, dtype: torch.dtype, device: torch.device) -> None:
    angles = torch.randn(shape[0], half, device=device)
    x = strided(shape, dtype, device)
    check(rotary_triton(x, angles.cos(), angles.sin()), rotary_ref(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 96), (65, 3000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = strided(shape, dtype, device)
    check(swiglu_triton(x), swiglu_ref(x))


@pytest.mark.parametrize("shape", [(0, 2, 8), (1, 1, 1), (5, 3, 24), (70, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_gate(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, gate = draw(*shape, dtype=dtype, device=device), strided(shape, dtype, device)
    check(sigmoid_gate_triton(x, gate), sigmoid_gate_ref(x, gate))


@pytest.mark.parametrize(("T", "half"), [(0, 4), (1, 1), (37, 12), (300, 32)])
def test_rotary_angles(T: int, half: int, device: torch.device) -> None:
    positions = torch.randint(0, 1 << 18, (T,), dtype=torch.int32, device=device)
    frequencies = 1.0 / 1e6 ** (torch.arange(half, device=device) / half)
    for given, expected in zip(
        rotary_angles_triton(positions, frequencies), rotary_angles_ref(positions, frequencies)
    ):
        assert given.is_contiguous()
        torch.testing.assert_close(given, expected, rtol=0, atol=2**-20)
