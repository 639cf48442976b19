"""Weights and rows as they are, in float8, or under an unfinished norm, and how a layer applies one to the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.ops.linear import (
    added_linear_float8,
    float8_linear,
    float8_linear_swiglu,
    float8_normed_linear,
    has_float8_added,
    has_float8_joined,
    normed_linear,
    quantize_rows,
)


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

    @property
    def blocks(self) -> Float8Blocks:
        """The same rows, as products in blocks take them."""
        return Float8Blocks(self.values, self.scales.t(), self.dtype)

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


@dataclass(frozen=True)
class Float8Blocks:
    """Rows rounded to float8 in blocks of columns by the product that made them, maybe of a norm without its factor.

    Attributes:
        values: [N, D] float8_e4m3fn. scales: [blocks, N] fp32, or [1, N], one for all columns.
        dtype: what they would be in otherwise.
        squares, eps: as in `UnfinishedRows`; None: they are finished.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    squares: Tensor | None = None
    eps: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """[N, D]."""
        return self.values.shape


FinishedRows = Tensor | Float8Rows
MadeRows = FinishedRows | Float8Blocks
Rows = MadeRows | UnfinishedRows
Weight = Tensor | Float8Weight


def linear(x: Rows, weight: Weight) -> Tensor:
    """A linear map without a bias: [N, D] -> [N, size] in x's dtype. A float8 weight takes rows in float8 or wide."""
    if isinstance(x, UnfinishedRows):
        assert isinstance(weight, Tensor), "a norm is finished by a product with wide weights"
        return normed_linear(x.values, weight, squares=x.squares, eps=x.eps)
    if isinstance(x, Float8Blocks):
        assert isinstance(weight, Float8Weight), "rows in float8 go to weights in float8"
        return float8_normed_linear(
            x.values,
            x.scales,
            weight.values,
            weight.scales,
            squares=x.squares,
            eps=x.eps,
            out_dtype=x.dtype,
        )
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


def gated_float8(x: Float8Rows | Float8Blocks, weight: Float8Weight) -> Float8Blocks | None:
    """The gated product of an MLP's first maps, rounded where it is made; None where there is no kernel for it.

    Args:
        x: [N, D]. weight: [2 * size, D], gate's rows first.
    """
    if x.dtype != torch.bfloat16 or weight.shape[0] % 32 or not has_float8_joined(x.shape[0], weight.values):
        return None
    rows = x.blocks if isinstance(x, Float8Rows) else x
    made = float8_linear_swiglu(
        rows.values, rows.scales, weight.values, weight.scales, squares=rows.squares, eps=rows.eps
    )
    return Float8Blocks(*made, rows.dtype)


def added_float8(
    product: nn.Module,
    x: MadeRows,
    residual: Tensor,
    reader: Float8Weight,
    norm_weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> Float8Blocks | None:
    """Add a linear map to the residual and round the norm of the sum; None where there is no kernel for it.

    Args:
        product: the map, [size, D]. x: [N, D], what it reads. residual: [N, size], changed in place.
        reader: the weight that reads the norm. norm_weight, eps, zero_centered: the norm's.
    """
    if not isinstance(product, (nn.Linear, Float8Linear)) or product.bias is not None:
        return None
    if isinstance(x, Float8Rows):
        x = x.blocks
    values, scales = (x, None) if isinstance(x, Tensor) else (x.values, x.scales)
    weight = product.weight
    factors, factor_scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
    if (
        (scales is None) != (factor_scales is None)
        or x.dtype != torch.bfloat16
        or residual.dtype != torch.float32
        or not has_float8_added(values, factors)
        or not has_float8_joined(values.shape[0], reader.values)
    ):
        return None
    made, made_scales, squares = added_linear_float8(
        values, scales, factors, factor_scales, residual=residual, norm_weight=norm_weight, zero_centered=zero_centered
    )  # fmt: skip
    return Float8Blocks(made, made_scales, torch.bfloat16, squares, eps)
