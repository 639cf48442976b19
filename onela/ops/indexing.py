"""Index helpers that every reference shares: which request a row belongs to, and gathers that respect PAD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

PAD = -1
"""The index that means: read nothing, write nothing, output zero."""


class RowIndex(TypedDict):
    """The five tensors by which an op finds each row's past; described at `replay_step_ref`."""

    slots: Tensor
    ancestors: Tensor
    cu_rows: Tensor
    prompts: Tensor
    depths: Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. Nobody waits when it comes from the host: a GPU fetches it from pinned memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def device_tensor(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these whole numbers on `device`, as `to_device` brings it there."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def rows_to_requests(cu_rows: Tensor, num_rows: int) -> Tensor:
    """Return the request of each packed row.

    Args:
        cu_rows: [B+1] int32; rows of request `r` are `cu_rows[r] : cu_rows[r+1]`.
        num_rows: N, at least `cu_rows[-1]`.
    Returns:
        requests: [N] int64; B for the rows past the last request.
    """
    rows = torch.arange(num_rows, device=cu_rows.device)
    return torch.bucketize(rows, cu_rows[1:].to(torch.int64), right=True)


def spread(per_request: Tensor, cu_rows: Tensor, num_rows: int, fill: int = -1) -> Tensor:
    """Spread one value per request over its rows; rows past the last request get `fill`. Returns [N] int64."""
    padded = torch.cat([per_request.to(torch.int64), per_request.new_full((1,), fill, dtype=torch.int64)])
    return padded[rows_to_requests(cu_rows, num_rows)]


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]`, with zeros where the index is negative."""
    if source.shape[0] == 0:
        return source.new_zeros((*index.shape, *source.shape[1:]))
    missing = index < 0
    if not index.is_cuda and not bool(missing.any()):
        # The common case, without a second pass over the rows; a GPU would have to be waited for.
        return source.index_select(0, index.flatten()).unflatten(0, index.shape)
    taken = source[index.clamp(min=0).to(torch.int64)]
    return taken.masked_fill_(_expand(missing, taken), 0)


def scatter_rows(target: Tensor, index: Tensor, values: Tensor) -> None:
    """`target[index] = values` in place, rows with a negative index left out."""
    if not index.is_cuda and index.numel() and int(index[0]) >= 0 and bool((index.diff() == 1).all()):
        # The common case, rows side by side, is one copy; a GPU would have to be waited for.
        target[int(index[0]) : int(index[0]) + index.numel()] = values
        return
    live = index >= 0
    target[index[live].to(torch.int64)] = values[live].to(target.dtype)


def copy_rows(
    target: Tensor,
    target_rows: Tensor | None,
    source: Tensor,
    source_rows: Tensor | None,
    *,
    parts: Tensor | None = None,
) -> None:
    """`target[target_rows[n]] = source[source_rows[n]]` in place, for every n where neither is negative.

    Args:
        target, source: [rows, ...] contiguous, of one dtype and row shape.
        target_rows, source_rows: [N] int32 or int64; None: n itself.
        parts: [N] int32, how many of a row's first parts (its second axis) matter; more may be copied. None: all.

    Aliasing: no row that is written is read in the same call. On a GPU nobody waits.
    """
    given = target_rows if target_rows is not None else source_rows
    assert given is not None, "one of the two indices"
    if target.is_cuda:
        from onela.ops._copy_rows import copy_rows_triton

        copy_rows_triton(target, target_rows, source, source_rows, parts)
        return
    own = torch.arange(given.shape[0], device=given.device)
    to, at = (own if rows is None else rows.to(torch.int64) for rows in (target_rows, source_rows))
    live = (to >= 0) & (at >= 0)
    target[to[live]] = source[at[live]]


def _expand(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *([1] * (like.dim() - mask.dim())))
