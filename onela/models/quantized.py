"""Weights in float8, and how a layer applies them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.ops.linear import float8_linear, quantize_rows


@dataclass(frozen=True)
class Float8Weight:
    """A linear map's weight rounded to float8, one scale a row.

    Attributes:
        values: [size, D] float8_e4m3fn. scales: [size, 1] fp32.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Float8Weight:
        """Round a weight [size, D]."""
        return cls(*quantize_rows(weight))

    @property
    def shape(self) -> torch.Size:
        """[size, D]."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, rows: slice) -> Float8Weight:
        """Some of the rows, sharing their memory."""
        return Float8Weight(self.values[rows], self.scales[rows])


Weight = Tensor | Float8Weight


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`F.linear` without a bias, over a weight of either kind: [N, D] -> [N, size]."""
    if isinstance(weight, Float8Weight):
        return float8_linear(x, weight.values, weight.scales)
    return F.linear(x, weight)


class Float8Linear(nn.Module):
    """In the place of an `nn.Linear` whose weight was rounded. A bias stays as it is, and is added afterwards."""

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.weight = Float8Weight.of(replaced.weight.data)
        self.bias = replaced.bias
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    def forward(self, x: Tensor) -> Tensor:
        product = float8_linear(x, self.weight.values, self.weight.scales)
        return product if self.bias is None else product + self.bias
