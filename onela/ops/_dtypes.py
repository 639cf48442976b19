"""In which precision the references compute."""

from __future__ import annotations

import torch


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp64 for fp64 input, fp32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
