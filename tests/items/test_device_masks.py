"""Rows of masks on the device; what their bits say is tested with the filters that they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onela.items import EligibilityIndex, MaskPool
from tests.items.test_eligibility import build


def test_no_memory_for_a_mask_leaves_no_row_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"sid": [code, 0, 0], "metadata": None} for code in range(2)]
    index = EligibilityIndex(build(rows))
    compiled = index.compile(exclude_item_ids=[0])
    assert compiled is not None
    pool = MaskPool(index, torch.device("cpu"))

    def fail(_: Any) -> Any:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_bring", fail)
        with pytest.raises(MemoryError):
            pool.acquire(compiled)
    assert pool.num_taken == 0
    assert pool.acquire(compiled) == 0
