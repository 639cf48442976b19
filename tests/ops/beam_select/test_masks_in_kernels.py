"""Edges that may not be taken: the reference against a smaller trie, and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops.beam_select import beam_select, beam_select_ref, kernels
from tests.ops.beam_select.test_kernels import CASES, compare, make_case, on

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def pack(bits: Tensor) -> Tensor:
    """[F, E] bool to [F, ceil(E / 32)] int32."""
    words = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 32)).reshape(bits.shape[0], -1, 32).long()
    packed = (words << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def with_masks(name: str, seed: int = 0) -> tuple[Tensor, dict, Tensor]:
    """A case with three masks, shared by requests, and one request without."""
    logits, arguments = make_case(name, ties=True, constrained=True, seed=seed)
    generator = torch.Generator().manual_seed(seed + 50)
    num_edges, B = arguments["child_codes"].shape[0], arguments["cu_rows"].shape[0] - 1
    bits = torch.rand(3, num_edges, generator=generator) < torch.tensor([[0.5], [0.02], [1.0]])
    rows = torch.tensor([0, -1, 1, 2, 0][:B] if B > 1 else [seed % 2], dtype=torch.int32)
    # Rows may be strided: a level is a slice of what holds all levels.
    wide = torch.cat([torch.full((3, 2), 77, dtype=torch.int32), pack(bits)], dim=1)
    return logits, {**arguments, "child_allowed": wide[:, 2:], "allowed_rows": rows}, bits


@pytest.mark.parametrize("normalizer", ["level", "allowed"])
@pytest.mark.parametrize("name", CASES)
def test_a_masked_edge_is_as_if_it_were_not_in_the_trie(name: str, normalizer: str) -> None:
    logits, arguments, bits = with_masks(name)
    masks = arguments.pop("child_allowed")
    rows = arguments.pop("allowed_rows").tolist()
    cu_rows, cu_out = arguments["cu_rows"].tolist(), arguments["cu_out"].tolist()
    got = beam_select_ref(
        logits, **arguments, child_allowed=masks, allowed_rows=torch.tensor(rows), normalizer=normalizer
    )
    offsets, codes = arguments["child_offsets"].long(), arguments["child_codes"]
    for r, mask_row in enumerate(rows):
        keep = torch.ones(len(codes), dtype=torch.bool) if mask_row < 0 else bits[mask_row]
        before = torch.cat([torch.zeros(1, dtype=torch.int64), keep.long().cumsum(0)])
        part, kept = slice(cu_rows[r], cu_rows[r + 1]), slice(cu_out[r], cu_out[r + 1])
        expected = beam_select_ref(
            logits[part],
            cum_logprobs=arguments["cum_logprobs"][part],
            cu_rows=torch.tensor([0, cu_rows[r + 1] - cu_rows[r]], dtype=torch.int32),
            cu_out=torch.tensor([0, cu_out[r + 1] - cu_out[r]], dtype=torch.int32),
            trie_nodes=arguments["trie_nodes"][part],
            child_offsets=before[offsets].int(),
            child_codes=codes[keep],
            normalizer=normalizer,
        )
        parents = got[0][kept]
        assert torch.equal(torch.where(parents < 0, parents, parents - cu_rows[r]), expected[0])
        assert torch.equal(got[1][kept], expected[1])
        torch.testing.assert_close(got[2][kept], expected[2])
        nodes = keep.nonzero()[:, 0]
        wanted = (
            expected[3] if len(nodes) == 0 else nodes[expected[3].clamp(min=0)].where(expected[3] >= 0, -1)
        )
        assert torch.equal(got[3][kept], wanted)


@pytest.mark.parametrize("spare", [(8, 1024), (0, 0)], ids=["candidates", "given up"])
@pytest.mark.parametrize("normalizer", ["level", "allowed", "given"])
@pytest.mark.parametrize("name", CASES)
def test_masks_in_the_kernels(
    name: str, normalizer: str, spare: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SPARE", spare[0])
    monkeypatch.setattr(kernels, "MORE", spare[1])
    logits, arguments, _ = with_masks(name, seed=1)
    arguments["normalizer"] = torch.zeros(logits.shape[0]) if normalizer == "given" else normalizer
    compare(logits, arguments, device, exact=normalizer == "given")


@pytest.mark.gpu
@pytest.mark.parametrize("normalizer", ["level", "allowed"])
def test_the_op_takes_masks_on_a_gpu(normalizer: str, device: torch.device) -> None:
    logits, arguments, _ = with_masks("ragged, an empty request", seed=2)
    expected = beam_select_ref(logits, **arguments, normalizer=normalizer)
    got = beam_select(logits.to(device), **on(device, arguments), normalizer=normalizer)
    torch.testing.assert_close(got[2].cpu(), expected[2], rtol=1e-5, atol=1e-5)


def test_half_a_mask_is_refused() -> None:
    logits, arguments, _ = with_masks("one beam, one code")
    for missing in ("child_allowed", "allowed_rows"):
        with pytest.raises(ShapeError, match="give both or neither"):
            beam_select(logits, **{**arguments, missing: None})
    with pytest.raises(ShapeError, match="child_allowed: expected shape"):
        beam_select(logits, **{**arguments, "child_allowed": torch.zeros(3, 9, dtype=torch.int32)})
    with pytest.raises(ShapeError, match="needs child_offsets"):
        beam_select(logits, **{**arguments, "child_offsets": None, "child_codes": None})
