"""The fused norm and rotation of queries and keys against its reference."""

from __future__ import annotations

import pytest
import torch

from onela.errors import ShapeError
from onela.ops.norm import qk_norm_rotary, qk_norm_rotary_ref
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.norm.qk_kernel import qk_norm_rotary_triton


def make_case(
    T: int, HQ: int, HKV: int, D: int, R: int, device: torch.device, dtype: torch.dtype = torch.float32
):
    """Heads of q lie beside their gates, as in the models' projection: they are strided."""
    generator = torch.Generator().manual_seed(T + D)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(T, HQ, 2 * D).to(dtype).to(device)[..., :D]
    k = normal(T, HKV, D).to(dtype).to(device)
    angles = normal(T, R // 2)
    return (q, k), {
        "q_weight": normal(D).to(dtype).to(device),
        "k_weight": normal(D).to(dtype).to(device),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "eps": 1e-6,
    }


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize(
    ("T", "HQ", "HKV", "D", "R"),
    [(5, 8, 2, 256, 64), (2, 16, 8, 128, 128), (1, 3, 1, 24, 24), (3, 4, 4, 16, 2), (0, 2, 1, 8, 4)],
)
def test_equals_the_reference(T, HQ, HKV, D, R, zero_centered, device):
    qk, options = make_case(T, HQ, HKV, D, R, device)
    expected = qk_norm_rotary_ref(*qk, **options, zero_centered=zero_centered)
    got = qk_norm_rotary_triton(*qk, **options, zero_centered=zero_centered)
    for want, have in zip(expected, got):
        assert have.is_contiguous()
        torch.testing.assert_close(have, want, **ROWS["fp32"])


@pytest.mark.parametrize(
    ("T", "HQ", "HKV", "D", "R"), [(6, 8, 2, 256, 64), (7, 3, 3, 24, 24), (0, 2, 1, 8, 4)]
)
def test_keys_and_values_in_their_pages(T, HQ, HKV, D, R, device):
    """In place or not; what has no page row goes nowhere, and nothing else is touched."""
    generator = torch.Generator().manual_seed(T)
    v = torch.randn(T, HKV + 1, D, generator=generator).to(device)[:, :HKV]
    page_rows = torch.randperm(5 * 4, generator=generator)[:T].to(torch.int32)
    page_rows[::3] = -1
    for in_place in (False, True):
        made, caches = [], []
        for run in (qk_norm_rotary_ref, qk_norm_rotary_triton):
            qk, options = make_case(T, HQ, HKV, D, R, device)
            given = [x.clone() for x in qk]
            pages = {name: torch.full((5, 4, HKV, D), 7.0, device=device) for name in ("k_cache", "v_cache")}
            made.append(run(*qk, **options, in_place=in_place, v=v, **pages, page_rows=page_rows.to(device)))
            caches.append(pages)
            for x, before, have in zip(qk, given, made[-1]):
                assert torch.equal(x, have if in_place else before)
        for want, have in zip(*made):
            torch.testing.assert_close(have, want, **ROWS["fp32"])
        kept = page_rows[page_rows >= 0].long()
        for name, rows in (("k_cache", made[1][1]), ("v_cache", v)):
            torch.testing.assert_close(caches[1][name], caches[0][name], **ROWS["fp32"])
            flat = caches[1][name].view(20, HKV, D)
            assert torch.equal(flat[kept], rows[page_rows >= 0])
            assert int((flat == 7).all(-1).all(-1).sum()) == 20 - len(kept)


def test_a_part_that_is_no_share_of_the_head_is_left_to_the_reference(device):
    qk, options = make_case(2, 2, 1, 12, 8, device)
    for want, have in zip(qk_norm_rotary_ref(*qk, **options), qk_norm_rotary(*qk, **options)):
        torch.testing.assert_close(have, want, **ROWS["fp32"])
    with pytest.raises(ShapeError, match="a part of 12 dimensions"):
        qk_norm_rotary_triton(*qk, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("HQ", "HKV", "D", "R"), [(8, 2, 256, 64), (16, 8, 128, 128)])
def test_half_precision(HQ, HKV, D, R, device):
    qk, options = make_case(1000, HQ, HKV, D, R, device, torch.bfloat16)
    for want, have in zip(qk_norm_rotary_ref(*qk, **options), qk_norm_rotary_triton(*qk, **options)):
        torch.testing.assert_close(have, want, **ROWS["bf16"])


def test_refuses_wrong_shapes(device):
    (q, k), options = make_case(2, 2, 1, 8, 4, device)
    with pytest.raises(ShapeError, match="k_weight"):
        qk_norm_rotary_triton(q, k, **(options | {"k_weight": options["k_weight"][1:]}))
    with pytest.raises(ShapeError, match="cos"):
        qk_norm_rotary_triton(q, k, **(options | {"cos": options["cos"][:1]}))
    with pytest.raises(ShapeError, match="v, k_cache, v_cache: none may be missing"):
        qk_norm_rotary_triton(q, k, **options, page_rows=torch.zeros(2, dtype=torch.int32))
    cache = torch.zeros(1, 4, 1, 6)
    with pytest.raises(ShapeError, match=r"k_cache: expected shape \[\*, \*, 1, 8\]"):
        qk_norm_rotary_triton(
            *(q, k), **options, page_rows=torch.zeros(2, dtype=torch.int32), v=k, k_cache=cache, v_cache=cache
        )
