"""What kernels are chosen and cut by: what a device has."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; a small number on the CPU, where only the interpreter runs kernels."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; no limit under the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10))


@lru_cache(maxsize=16)
def has_wgmma(device: torch.device) -> bool:
    """Whether the device multiplies from shared memory (Hopper), which leaves registers for larger tiles."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
