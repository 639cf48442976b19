"""The selection kernels against their reference: equal where normalizers are given, close where not."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.beam_select import kernels
from onela.ops.beam_select._candidate_kernels import NUM_BINS, bin_of, edge_of
from onela.ops.beam_select.reference import beam_select_ref

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@triton.jit
def bins_and_edges(p_keys, p_numbers, p_edges, n, BLOCK: tl.constexpr):
    o_i = tl.arange(0, BLOCK)
    tl.store(p_numbers + o_i, bin_of(tl.load(p_keys + o_i, mask=o_i < n)), mask=o_i < n)
    o_b = tl.arange(0, NUM_BINS)
    tl.store(p_edges + o_b, edge_of(o_b))


NAMES = ("parent_rows", "codes", "cum_logprobs", "child_nodes")
CASES = {
    "ragged, an empty request": ([5, 0, 9, 1], [6, 3, 9, 40], 33, 0),
    "padding at the end": ([20, 31], [17, 70], 100, 3),
    "one beam, one code": ([1], [1], 1, 0),
    "nobody wants anything": ([4, 2], [0, 0], 8, 1),
    "one past a power of two": ([3, 65], [65, 2], 129, 0),
    "more codes than a block of children": ([2, 3, 9], [5, 700, 1], 700, 0),
}


def offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def make_case(name: str, *, ties: bool, constrained: bool, seed: int = 0) -> tuple[Tensor, dict]:
    """Rows with padding, impossible beams, nodes without children and nodes with all codes."""
    generator = torch.Generator().manual_seed(seed)
    rows, widths, C, extra = CASES[name]
    N = sum(rows) + extra
    logits = torch.randn(N, C, generator=generator) * 3
    cum = -5 * torch.rand(N, generator=generator)
    if ties:
        logits, cum = logits.round(), cum.round()
    nodes = torch.randint(0, 7, (N,), generator=generator, dtype=torch.int32)
    nodes[2::5] = -1
    cum[3::7] = float("-inf")
    child_offsets = child_codes = None
    if constrained:
        counts = [min(C, count) for count in (0, 1, 3, C, 17, 2, 5)]
        child_offsets = offsets(counts)
        child_codes = torch.cat(
            [torch.randperm(C, generator=generator)[:n].sort().values for n in counts]
        ).int()
    return logits, {
        "cum_logprobs": cum,
        "cu_rows": offsets(rows),
        "cu_out": offsets(widths),
        "trie_nodes": nodes,
        "child_offsets": child_offsets,
        "child_codes": child_codes,
        "num_out": sum(widths) + extra,
    }


def on(device: torch.device, arguments: dict) -> dict:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def compare(logits: Tensor, arguments: dict, device: torch.device, *, exact: bool = True) -> None:
    expected = beam_select_ref(logits, **arguments)
    got = kernels.beam_select(logits.to(device), **on(device, arguments))
    for name, want, have in zip(NAMES, expected, got):
        if name == "cum_logprobs" and not exact:
            torch.testing.assert_close(have.cpu(), want, rtol=1e-5, atol=1e-5)
        else:
            assert want.dtype == have.dtype, name
            assert torch.equal(have.cpu(), want), name


@pytest.mark.parametrize(
    ("max_items", "spare", "more"),
    [(32768, 8, 1024), (32768, 0, 0), (None, 0, 0)],
    ids=["candidates", "given up, one segment", "given up, many segments"],
)
@pytest.mark.parametrize("constrained", [False, True], ids=["all codes", "trie"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", CASES)
def test_given_normalizers(name, ties, constrained, max_items, spare, more, device, monkeypatch):
    if max_items is None:  # several of groups and of codes, and no more than the interpreter can work off
        max_items = 64 if sum(CASES[name][1]) < 500 else 256
    monkeypatch.setattr(kernels, "MAX_ITEMS", max_items)
    monkeypatch.setattr(kernels, "SPARE", spare)
    monkeypatch.setattr(kernels, "MORE", more)
    logits, arguments = make_case(name, ties=ties, constrained=constrained)
    arguments["normalizer"] = torch.randn(logits.shape[0], generator=torch.Generator().manual_seed(1)).round()
    compare(logits, arguments, device)


@pytest.mark.parametrize("normalizer", ["level", "allowed"])
@pytest.mark.parametrize("constrained", [False, True], ids=["all codes", "trie"])
@pytest.mark.parametrize("name", CASES)
def test_own_normalizers(name, constrained, normalizer, device):
    logits, arguments = make_case(name, ties=False, constrained=constrained, seed=2)
    compare(logits, arguments | {"normalizer": normalizer}, device, exact=False)


def test_everything_ties(device):
    """All scores equal: the first W (row, code) pairs win, also over segments."""
    logits, arguments = make_case("padding at the end", ties=True, constrained=False)
    arguments["normalizer"] = torch.zeros(logits.shape[0])
    arguments["cum_logprobs"] = torch.zeros(logits.shape[0])
    compare(torch.zeros_like(logits), arguments, device)


def test_signed_zeros_tie(device):
    logits, arguments = make_case("padding at the end", ties=True, constrained=False)
    arguments["normalizer"] = torch.zeros(logits.shape[0])
    arguments["cum_logprobs"] = torch.where(torch.arange(logits.shape[0]) % 2 == 0, -0.0, 0.0)
    signs = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    logits = torch.where(signs, -0.0, 0.0)
    expected = beam_select_ref(logits, **arguments)
    got = kernels.beam_select(logits.to(device), **on(device, arguments))
    assert torch.equal(expected[0], got[0].cpu())
    assert torch.equal(expected[1], got[1].cpu())


def test_all_padding(device):
    logits, arguments = make_case("ragged, an empty request", ties=False, constrained=True)
    arguments["trie_nodes"] = torch.full_like(arguments["trie_nodes"], -1)
    compare(logits, arguments, device)


def test_one_row_becomes_a_whole_beam(device):
    """The first step: one row per request, many survivors."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(5))
    arguments = {
        "cum_logprobs": torch.zeros(2),
        "cu_rows": offsets([1, 1]),
        "cu_out": offsets([100, 299]),
        "trie_nodes": torch.zeros(2, dtype=torch.int64),
        "normalizer": torch.zeros(2),
    }
    compare(logits, arguments, device)


def test_strided_rows_and_half_precision(device):
    logits, arguments = make_case("padding at the end", ties=False, constrained=True)
    wide = torch.zeros(logits.shape[0], logits.shape[1] + 24, dtype=torch.float16)
    wide[:, : logits.shape[1]] = logits
    arguments["normalizer"] = torch.zeros(logits.shape[0])
    compare(wide[:, : logits.shape[1]], arguments, device)


def test_a_nan_score_is_never_chosen(device):
    logits, arguments = make_case("padding at the end", ties=False, constrained=False)
    arguments["normalizer"] = torch.zeros(logits.shape[0])
    clean = logits.clone()
    logits[:, 7], clean[:, 7] = float("nan"), float("-inf")
    expected = beam_select_ref(clean, **arguments)
    got = kernels.beam_select(logits.to(device), **on(device, arguments))
    for want, have in zip(expected, got):
        assert torch.equal(have.cpu(), want)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("normalizer", ["level", "allowed", "given"])
@pytest.mark.parametrize("constrained", [False, True], ids=["all codes", "trie"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told(bad, constrained, normalizer, device):
    """Where all logits are read, all count; where a trie's children alone are read, those do."""
    logits, arguments = make_case("padding at the end", ties=False, constrained=constrained)
    if normalizer == "given":
        arguments["normalizer"] = torch.zeros(logits.shape[0])
    else:
        arguments["normalizer"] = normalizer
    logits[::3, 61] = bad
    expected = torch.zeros(logits.shape[0], dtype=torch.bool)
    beam_select_ref(logits, **arguments, finite=expected)
    alive = (arguments["trie_nodes"] >= 0) & (arguments["cum_logprobs"] > -torch.inf)
    rows_of_requests = int(arguments["cu_rows"][-1])
    if not constrained or normalizer == "level":
        assert torch.equal(expected, (torch.arange(logits.shape[0]) % 3 > 0) | ~alive)
    else:
        assert 0 < int((~expected).sum()) < int(alive[::3].sum())
    got = torch.zeros(logits.shape[0], dtype=torch.bool, device=device)
    kernels.beam_select(logits.to(device), **on(device, arguments), finite=got)
    assert torch.equal(got.cpu()[:rows_of_requests], expected[:rows_of_requests])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0, 1e5])
def test_scores_of_any_size(scale, device):
    """Whatever bins they fall into: tiny, of either sign, or beyond the outermost."""
    generator = torch.Generator().manual_seed(11)
    rows, C = [12, 3], 600
    arguments = {
        "cum_logprobs": torch.zeros(15),
        "cu_rows": offsets(rows),
        "cu_out": offsets([40, 70]),
        "trie_nodes": torch.zeros(15, dtype=torch.int32),
        "normalizer": torch.zeros(15),
    }
    compare(torch.randn(15, C, generator=generator) * scale, arguments, device)


def test_bins_are_in_order(device):
    """Every key lies at or above its bin's edge, and below the next one's."""
    sizes = torch.logspace(-9, 6, 4000)
    scores = torch.cat([-sizes.flip(0), torch.zeros(1), sizes])
    bits = scores.view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(device)
    numbers, edges = torch.empty_like(keys), torch.empty(NUM_BINS.value, dtype=torch.int32, device=device)
    bins_and_edges[(1,)](keys, numbers, edges, keys.shape[0], BLOCK=triton.next_power_of_2(keys.shape[0]))
    numbers, edges, keys = numbers.cpu().long(), edges.cpu().long(), keys.cpu().long()
    assert bool((numbers.diff() >= 0).all())
    assert bool((keys >= edges[numbers]).all())
    inner = numbers < NUM_BINS.value - 1
    assert bool((keys[inner] < edges[numbers[inner] + 1]).all())


def test_refuses_what_it_cannot_do():
    logits, arguments = make_case("padding at the end", ties=False, constrained=True)
    with pytest.raises(ShapeError, match="at most"):
        kernels.beam_select(torch.zeros(logits.shape[0], kernels.MAX_CODES + 1), **arguments)
    with pytest.raises(ShapeError, match="both or neither"):
        kernels.beam_select(logits, **(arguments | {"child_codes": None}))
    with pytest.raises(DtypeError, match="trie_nodes"):
        kernels.beam_select(logits, **(arguments | {"trie_nodes": arguments["trie_nodes"].float()}))


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "W", "C"), [(4, 256, 8192), (16, 512, 8192), (1, 5000, 8192), (2, 300, 16384)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_real_sizes(R, W, C, ties, device):
    generator = torch.Generator(device).manual_seed(7)
    logits = torch.randn(R * W, C, generator=generator, device=device) * 3
    cum = -5 * torch.rand(R * W, generator=generator, device=device)
    if ties:
        logits, cum = logits.round(), cum.round()
    arguments = {
        "cum_logprobs": cum,
        "cu_rows": offsets([W] * R).to(device),
        "cu_out": offsets([W] * R).to(device),
        "trie_nodes": torch.zeros(R * W, dtype=torch.int32, device=device),
        "normalizer": torch.zeros(R * W, device=device),
        "num_out": R * W,
    }
    first = kernels.beam_select(logits, **arguments)
    again = kernels.beam_select(logits, **arguments)
    for name, a, b in zip(NAMES, first, again):
        assert torch.equal(a, b), name
    compare(logits.cpu(), {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}, device)
