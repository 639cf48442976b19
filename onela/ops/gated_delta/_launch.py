"""How the Gated DeltaNet kernels are cut into programs: shared by every wrapper that launches one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from onela.ops._device import multiprocessors

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU. `tl.dot` of bf16 operands is wrong there, so kernels upcast first."""


@dataclass(frozen=True)
class ReplayConfig:
    """One way to cut a replay.

    Args:
        block_w: beams of a tile.
        block_v: value columns of a program; its state block takes `4 * K * block_v` bytes of shared memory.
        num_warps: warps of a program.
        stages: records in flight ahead of their use, through shared memory; 1: through registers.
        prefetch: bring the next tile's rows to the L2 cache while this one is computed.
        overlap: begin while the kernel before drains (Hopper and newer): the state is loaded then, all else after it.
        programs_per_sm: programs wanted on each multiprocessor.
    """

    block_w: int = 32
    block_v: int = 128
    num_warps: int = 4
    stages: int = 1
    prefetch: bool = False
    overlap: bool = False
    programs_per_sm: int = 2


def choose_splits(
    N: int, B: int, heads: int, *, block_w: int, programs_per_sm: int, device: torch.device
) -> int:
    """Programs per request and head: enough to fill the device, no more than the mean request has tiles."""
    wanted = programs_per_sm * multiprocessors(device)
    tiles = -(-N // (max(B, 1) * block_w))
    return max(1, min(tiles, wanted // max(1, B * heads)))
