# mypy: disable-error-code="no-untyped-def"
"""Kernels that begin while the one before them drains (Hopper and newer)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """First in a kernel: let the next one begin, then wait for all that the one before has written."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap_of(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel begins with `wait_for_previous(OVERLAP)`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
