"""Joined products, by definition: what norms, sums and gates apart from the products give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onela.errors import DtypeError, ShapeError
from onela.ops.linear import (
    added_linear,
    added_linear_ref,
    heads_linear,
    heads_linear_ref,
    linear_swiglu,
    linear_swiglu_ref,
    normed_linear,
    normed_linear_ref,
)
from onela.ops.norm import rms_norm_ref, rotary_ref, swiglu_ref
from tests.tolerances import EXACT_FP64


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("N", [0, 1, 5])
def test_a_norm_cut_in_two_is_the_norm(zero_centered: bool, N: int) -> None:
    torch.manual_seed(N)
    x, weight = torch.randn(N, 24, dtype=torch.float64), torch.randn(16, 24, dtype=torch.float64)
    residual, norm = torch.randn(N, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    reader = torch.randn(12, 16, dtype=torch.float64)
    whole = residual.clone()
    options = {"eps": 1e-2, "zero_centered": zero_centered}
    rows = rms_norm_ref(F.linear(x, weight), norm, residual=whole, **options)

    values, squares = added_linear(
        x, weight, residual=residual, norm_weight=norm, zero_centered=zero_centered
    )
    torch.testing.assert_close(residual, whole, **EXACT_FP64)
    made = normed_linear(values, reader, squares=squares, eps=1e-2)
    torch.testing.assert_close(made, F.linear(rows, reader), **EXACT_FP64)
    made = linear_swiglu(values, reader, squares=squares, eps=1e-2)
    torch.testing.assert_close(made, swiglu_ref(F.linear(rows, reader)), **EXACT_FP64)
    torch.testing.assert_close(normed_linear(rows, reader), F.linear(rows, reader), **EXACT_FP64)


def test_a_wide_residual_takes_the_sum_unrounded() -> None:
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    residual = torch.zeros(1, 1)
    values, squares = added_linear_ref(x, weight, residual=residual, norm_weight=torch.zeros(1))
    assert residual.item() == 1 + 2**-9
    assert values.dtype == torch.bfloat16
    assert squares.item() == (1 + 2**-9) ** 2


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("N", [0, 5])
def test_heads_are_those_of_single_maps(N: int, gated: bool) -> None:
    torch.manual_seed(0)
    K, HQ, HKV, D = 12, 4, 2, 8
    x = torch.randn(N, K, dtype=torch.float64)
    maps = {name: torch.randn(heads, D, K, dtype=torch.float64) for name, heads in (("q", HQ), ("gate", HQ))}
    maps |= {name: torch.randn(HKV, D, K, dtype=torch.float64) for name in "kv"}
    first = torch.stack([maps["q"], maps["gate"]], 1) if gated else maps["q"]
    weight = torch.cat([part.reshape(-1, K) for part in (first, maps["k"], maps["v"])])
    norms = {name: torch.randn(D, dtype=torch.float64) for name in ("q_weight", "k_weight")}
    angles = torch.rand(N, 2, dtype=torch.float64)
    options = {"cos": angles.cos(), "sin": angles.sin(), "num_heads": HQ, "num_kv_heads": HKV, "eps": 1e-2}
    squares = x.square().sum(1)[None]
    made = heads_linear(x, weight, **norms, **options, squares=squares, squares_eps=1e-3)
    rows = rms_norm_ref(x, torch.zeros(K, dtype=torch.float64), eps=1e-3)
    for name, have in zip(("q", "k", "v", "gate"), made):
        if name == "gate" and not gated:
            assert have is None
            continue
        want = torch.einsum("nk,hdk->nhd", rows, maps[name])
        if name in "qk":
            want = rms_norm_ref(want, norms[f"{name}_weight"], eps=1e-2)
            want = rotary_ref(want, options["cos"], options["sin"])
        torch.testing.assert_close(have, want, **EXACT_FP64)
    with pytest.raises(
        ShapeError, match="weight: expected 64 rows for 4 query and 2 key heads of 8, or 96 with"
    ):
        heads_linear_ref(x, weight[:-8], **norms, **options)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, residual = torch.ones(2, 4), torch.ones(6, 4), torch.ones(2, 6)
    with pytest.raises(ShapeError, match=r"weight: expected shape \[\*, 4\]"):
        normed_linear_ref(x, torch.ones(6, 5))
    with pytest.raises(ShapeError, match=r"squares: expected shape \[\*, 2\]"):
        linear_swiglu_ref(x, weight, squares=torch.ones(1, 3))
    with pytest.raises(ShapeError, match=r"residual: expected shape \[2, 6\]"):
        added_linear_ref(x, weight, residual=torch.ones(2, 5), norm_weight=torch.ones(6))
    with pytest.raises(ShapeError, match=r"norm_weight: expected shape \[6\]"):
        added_linear_ref(x, weight, residual=residual, norm_weight=torch.ones(5))
    with pytest.raises(DtypeError, match="x"):
        normed_linear_ref(x.int(), weight)
