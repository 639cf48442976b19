"""Rows, states and records of random numbers for the Gated DeltaNet ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sizes:
    H: int = 2
    HV: int = 4
    K: int = 32
    V: int = 64


def random_rows(n: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, seed: int = 1) -> dict[str, Tensor]:
    """Rows `q, k, v, g, beta` of `n` tokens; the gates stay fp32 (fp64 for fp64 rows)."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = {
        "q": normal(n, sizes.H, sizes.K).to(dtype),
        "k": normal(n, sizes.H, sizes.K).to(dtype),
        "v": normal(n, sizes.HV, sizes.V).to(dtype),
        "g": -normal(n, sizes.HV).abs().mul(0.3).to(gates),
        "beta": normal(n, sizes.HV).sigmoid().to(gates),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def random_state(num_prompts: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_prompts, sizes.HV, sizes.V, sizes.K)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.2).to(device, dtype)


def empty_records(
    num_slots: int, sizes: Sizes, dtype: torch.dtype, device: Any, *, k_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Records full of NaN: what no step has written must never be read."""
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    nan = float("nan")
    return {
        "records_g": torch.full((num_slots, sizes.HV), nan, dtype=gates, device=device),
        "records_delta": torch.full((num_slots, sizes.HV, sizes.V), nan, dtype=dtype, device=device),
        "records_k": torch.full((num_slots, sizes.H, sizes.K), nan, dtype=k_dtype or dtype, device=device),
    }
