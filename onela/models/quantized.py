"""Weights and rows as they are, in float8, or under an unfinished norm, and how a layer applies one to the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.ops.linear import float8_linear, normed_linear, quantize_rows


@dataclass(frozen=True)
class Float8Rows:
    """Rows rounded to float8 by whoever made them, under one scale each.

    Attributes:
        values: [N, D] float8_e4m3fn. scales: [N, 1] fp32. dtype: what they would be in otherwise.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Float8Rows:
        """Round rows [N, D]."""
        return cls(*quantize_rows(x), x.dtype)

    @property
    def shape(self) -> torch.Size:
        """[N, D]."""
        return self.values.shape

    def index_select(self, dim: int, index: Tensor) -> Float8Rows:
        """Some of the rows, as `Tensor.index_select` gives them."""
        # torch gathers bytes everywhere, float8 not.
        picked = self.values.view(torch.uint8).index_select(dim, index).view(self.values.dtype)
        return Float8Rows(picked, self.scales.index_select(dim, index), self.dtype)


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


@dataclass(frozen=True)
class UnfinishedRows:
    """Rows of a norm whose factor is applied by the product that reads them.

    Attributes:
        values: [N, D], under the norm's weight. squares: [parts, N] fp32, sums of squares of pieces of what is normed.
        eps: the norm's.
    """

    values: Tensor
    squares: Tensor
    eps: float

    @property
    def shape(self) -> torch.Size:
        """[N, D]."""
        return self.values.shape


FinishedRows = Tensor | Float8Rows
Rows = FinishedRows | UnfinishedRows
Weight = Tensor | Float8Weight


def linear(x: Rows, weight: Weight) -> Tensor:
    """A linear map without a bias: [N, D] -> [N, size] in x's dtype. A float8 weight takes rows in float8 or wide."""
    if isinstance(x, UnfinishedRows):
        assert isinstance(weight, Tensor), "a norm is finished by a product with wide weights"
        return normed_linear(x.values, weight, squares=x.squares, eps=x.eps)
    if isinstance(weight, Float8Weight):
        rows = Float8Rows.of(x) if isinstance(x, Tensor) else x
        return float8_linear(rows.values, rows.scales, weight.values, weight.scales, out_dtype=rows.dtype)
    assert isinstance(x, Tensor), "rows in float8 go to weights in float8"
    return F.linear(x, weight)


class Float8Linear(nn.Module):
    """In the place of an `nn.Linear` whose weight was rounded. A bias stays as it is, and is added afterwards."""

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.weight = Float8Weight.of(replaced.weight.data)
        self.bias = replaced.bias
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    def forward(self, x: Rows) -> Tensor:
        product = linear(x, self.weight)
        return product if self.bias is None else product + self.bias
