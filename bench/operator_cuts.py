"""Cuts of the Hopper kernel as arms of the operator benchmark: warps, ring and programs given instead of chosen.

python bench/operator_sweep.py cuts
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.operator import ARMS, Calls, Problem, arm, replay_calls

WARPS_AND_RINGS = {128: ((4, 5), (4, 6), (4, 8)), 256: ((4, 8), (8, 4), (8, 5), (8, 6))}
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


def cut_name(num_warps: int, ring: int, splits: int) -> str:
    return f"replay_{num_warps}_warps_ring_{ring}_splits_{splits}"


def cuts(K: int, tiles: int) -> list[str]:
    """Names of the cuts that make sense for a key size and a request of so many tiles of 32 rows."""
    return [
        cut_name(num_warps, ring, splits)
        for (num_warps, ring), splits in product(WARPS_AND_RINGS[K], SPLITS)
        if splits <= max(1, tiles * 4 // num_warps)
    ]


def register(num_warps: int, ring: int, splits: int) -> None:
    def calls(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
        from onela.ops.gated_delta.replay_hopper import HopperConfig, launch_hopper

        config = HopperConfig(num_warps=num_warps, ring=ring, splits=splits)

        def step(*rows: Tensor, **keywords: Any) -> Tensor:
            return launch_hopper(*rows, **keywords, config=config)

        return replay_calls(step, problem, out_dtype, raw=True)

    arm(cut_name(num_warps, ring, splits))(calls)


for _pair in sorted({pair for pairs in WARPS_AND_RINGS.values() for pair in pairs}):
    for _splits in SPLITS:
        if cut_name(*_pair, _splits) not in ARMS:
            register(*_pair, _splits)
