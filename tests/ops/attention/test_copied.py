"""Attention over copied keys against the reference, and against torch's attention over the same keys in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onela.ops.attention import beam_attention_copied, beam_attention_ref, copied
from onela.ops.attention.reference import prompt_rows
from tests.ops.attention.test_kernels import CASES, Sizes, make_case
from tests.tolerances import ATTENTION


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("room", [1, 1 << 30])
def test_equals_the_reference(
    name: str, dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and records, whether all beams are looked at together or each by itself."""
    monkeypatch.setattr(copied, "COPY_BYTES", room)
    rows, step = make_case(CASES[name], dtype)
    own = {part: step[part].clone() for part in ("records_k", "records_v")}
    found = beam_attention_copied(*rows, **{**step, **own})
    expected = beam_attention_ref(*rows, **step)
    torch.testing.assert_close(found, expected, **ATTENTION["fp32" if dtype == torch.float32 else "bf16"])
    for part, records in own.items():
        assert torch.equal(records, step[part])


def test_bit_for_bit_the_attention_of_whole_rows() -> None:
    (q, k, v), step = make_case(Sizes((6,), (70,), (2,), HQ=4, HKV=2, D=32), torch.bfloat16)
    found = beam_attention_copied(q, k, v, **step)
    live = (step["slots"] >= 0).nonzero()[:, 0].tolist()
    assert len(live) == 5
    keys, values = (
        torch.stack(
            [
                torch.cat(
                    [
                        prompt_rows(step[f"{part}_cache"], step["page_table"], 0, 70),
                        step[f"records_{part}"][step["ancestors"][row, :2].long()],
                        new[row : row + 1],
                    ]
                )
                for row in live
            ]
        ).transpose(1, 2)
        for part, new in (("k", k), ("v", v))
    )
    expected = F.scaled_dot_product_attention(q[live, :, None], keys, values, enable_gqa=True)[:, :, 0]
    assert torch.equal(found[live], expected)
