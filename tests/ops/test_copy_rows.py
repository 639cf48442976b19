"""Copies of rows by two indices: the kernel against a loop."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from onela.ops._copy_rows import copy_rows_triton
from onela.ops.indexing import copy_rows


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (4, 8200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("which", ["both", "target", "source"])
def test_rows_are_copied_where_both_indices_live(
    shape: tuple[int, ...], dtype: torch.dtype, which: str, device: torch.device
) -> None:
    source = (100 * torch.randn(6, *shape)).to(device, dtype)
    target = (100 * torch.randn(9, *shape)).to(device, dtype)
    to = torch.tensor([8, -1, 0, 3, 5], dtype=torch.int32, device=device) if which != "source" else None
    at = torch.tensor([2, 1, 2, -1, 5], dtype=torch.int32, device=device) if which != "target" else None
    expected = target.clone()
    for n in range(5):
        i, j = (n if index is None else int(index[n]) for index in (to, at))
        if i >= 0 and j >= 0:
            expected[i] = source[j]
    plain = target.clone()
    copy_rows(plain, to, source, at)
    copy_rows_triton(target, to, source, at, None)
    assert torch.equal(target, expected)
    assert torch.equal(plain, expected)


def test_only_the_first_parts_are_copied(device: torch.device) -> None:
    source, target = torch.randn(4, 5, 7, device=device), torch.randn(4, 5, 7, device=device)
    rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    parts = torch.tensor([2, 5, 0], dtype=torch.int32, device=device)
    expected = target.clone()
    expected[3, :2] = source[0, :2]
    copy_rows_triton(target, rows, source, None, parts)
    assert torch.equal(target, expected)
