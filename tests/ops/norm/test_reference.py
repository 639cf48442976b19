"""Norms and rotary positions against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    apply_rotary_pos_emb,
)

from onela.ops.norm import gated_rms_norm_ref, rms_norm_ref, rotary_ref, swiglu_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(dtype: torch.dtype, zero_centered: bool) -> None:
    witness = (Qwen3_5RMSNorm if zero_centered else Qwen3RMSNorm)(24).to(dtype)
    witness.weight.data = torch.randn(24, dtype=dtype)
    x = torch.randn(7, 24, dtype=dtype)
    got = rms_norm_ref(x, witness.weight, eps=1e-6, zero_centered=zero_centered)
    assert torch.equal(got, witness(x))


def test_rms_norm_adds_the_residual_in_place() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    got = rms_norm_ref(x, weight, eps=1e-6, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(got, rms_norm_ref(total, weight, eps=1e-6))


def test_rms_norm_keeps_a_wide_residual_wide() -> None:
    x, residual, weight = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(8).bfloat16()
    total = x.float() + residual
    got = rms_norm_ref(x, weight, eps=1e-6, residual=residual)
    assert (residual.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(residual, total)
    assert torch.equal(got, rms_norm_ref(total, weight.float(), eps=1e-6).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    witness = Qwen3_5RMSNormGated(24, eps=1e-6).to(dtype)
    witness.weight.data = torch.randn(24, dtype=dtype)
    x, gate = torch.randn(7, 3, 24, dtype=dtype), torch.randn(7, 3, 24, dtype=dtype)
    torch.testing.assert_close(gated_rms_norm_ref(x, gate, witness.weight, eps=1e-6), witness(x, gate))


@pytest.mark.parametrize("rotary_dim", [4, 16])
def test_rotary(rotary_dim: int) -> None:
    q = torch.randn(5, 3, 16)
    angles = torch.randn(5, rotary_dim // 2)
    doubled = torch.cat([angles, angles], dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], q.transpose(0, 1)[None], doubled.cos(), doubled.sin()
    )
    torch.testing.assert_close(rotary_ref(q, angles.cos(), angles.sin()), expected[0].transpose(0, 1))


def test_swiglu() -> None:
    x = torch.randn(4, 12)
    assert torch.equal(swiglu_ref(x), torch.nn.functional.silu(x[:, :6]) * x[:, 6:])
