"""Hopper's joined products against their references, over every tile and awkward sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onela.errors import ShapeError
from onela.ops.linear import (
    added_linear_ref,
    dispatch,
    has_added,
    has_heads,
    has_joined,
    heads_linear_ref,
    linear_swiglu_ref,
    normed_linear_ref,
)

pytest.importorskip("triton")
from onela.ops.linear.gated_hopper import choose_widths, gated_linear_hopper
from onela.ops.linear.joined_hopper import (
    ADDED,
    GATED,
    PLAIN,
    TILES,
    Tile,
    added_linear_hopper,
    choose_tile,
    heads_linear_hopper,
    linear_swiglu_hopper,
    normed_linear_hopper,
)
from tests.tolerances import ROWS

# Rows, depth, columns: more tiles than multiprocessors, one row, ends within tiles, a depth shorter than the ring.
SIZES = [(1024, 1024, 8224), (1, 192, 2048), (1000, 1024, 1024), (77, 3584, 1024), (2500, 64, 1040)]


def factors(N: int, D: int, size: int, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(N + D + size)
    x = torch.randn(N, D, device="cuda").bfloat16()
    weight = (torch.randn(size, D, device="cuda") / D**0.5).bfloat16()
    return x, weight, torch.rand(parts, N, device="cuda") * D / parts if parts else None


def near(have: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to rounding, where want is what fp32 gives; of cancelled sums the size of the terms counts."""
    scale = float(want.abs().amax()) if want.numel() else 1.0
    torch.testing.assert_close(
        have.float() / scale, want.float() / scale, rtol=ROWS["bf16"]["rtol"], atol=2**-10
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES[PLAIN], ids=str)
@pytest.mark.parametrize("parts", [0, 1, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_normed(sizes: tuple[int, int, int], parts: int, tile: Tile) -> None:
    x, weight, squares = factors(*sizes, parts)
    have = normed_linear_hopper(x, weight, squares=squares, eps=1e-6, tile=tile)
    near(have, normed_linear_ref(x, weight, squares=squares, eps=1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES[GATED], ids=str)
@pytest.mark.parametrize("parts", [0, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gated(sizes: tuple[int, int, int], parts: int, tile: Tile) -> None:
    x, weight, squares = factors(sizes[0], sizes[1], 2 * sizes[2], parts)
    have = linear_swiglu_hopper(x, weight, squares=squares, eps=1e-6, tile=tile)
    near(have, linear_swiglu_ref(x, weight, squares=squares, eps=1e-6))


# Rows, depth, columns of the result, wide and narrow tiles: those that are chosen, only narrow ones, ends within tiles.
WIDTHS = [
    ((1024, 1024, 3584), (13, 20)),
    ((256, 2048, 6144), (0, 64)),
    ((1000, 192, 1040), (5, 5)),
    ((77, 64, 320), (1, 2)),
    ((1, 320, 200), (1, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 16])
@pytest.mark.parametrize(("sizes", "widths"), WIDTHS, ids=str)
def test_gated_in_two_widths(sizes: tuple[int, int, int], widths: tuple[int, int], parts: int) -> None:
    x, weight, squares = factors(sizes[0], sizes[1], 2 * sizes[2], parts)
    have = gated_linear_hopper(x, weight, widths, squares=squares, eps=1e-6)
    near(have, linear_swiglu_ref(x, weight, squares=squares, eps=1e-6))
    assert torch.equal(have, gated_linear_hopper(x, weight, widths, squares=squares, eps=1e-6))


def test_widths_are_chosen_where_they_fill_the_device() -> None:
    for N in (1, 128, 1000, 1024, 2048):
        for size in (64, 1024, 3584, 6144):
            widths = choose_widths(N, size, 1024, 132)
            assert widths is None or 128 * widths[0] + 96 * widths[1] >= size
    # Two tiles for every multiprocessor, or one, where there would be rounds of half of them.
    assert choose_widths(1024, 3584, 1024, 132) == (13, 20)
    assert choose_widths(256, 6144, 2048, 132) == (0, 64)
    # All tiles have one multiprocessor each, whatever their width.
    assert choose_widths(128, 1024, 1024, 132) is None


@pytest.mark.gpu
def test_a_gate_far_from_zero() -> None:
    x = torch.eye(128, device="cuda").bfloat16()
    gate = torch.linspace(-300, 300, 64, device="cuda")[:, None].expand(64, 128)
    weight = torch.cat([gate, torch.ones_like(gate)]).bfloat16().contiguous()
    near(linear_swiglu_hopper(x, weight), linear_swiglu_ref(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES[ADDED], ids=str)
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("sizes", [(1024, 2048, 1024), (1, 192, 2048), (1000, 64, 1280)], ids=str)
def test_added(sizes: tuple[int, int, int], zero_centered: bool, tile: Tile) -> None:
    x, weight, _ = factors(*sizes, 0)
    N, _, size = sizes
    norm = torch.randn(size, device="cuda").bfloat16()
    start = torch.randn(N, size + 32, device="cuda")
    expected, *found = (start.clone()[:, :size] for _ in range(3))
    options = {"norm_weight": norm, "zero_centered": zero_centered}
    want = added_linear_ref(x, weight, residual=expected, **options)
    made = [added_linear_hopper(x, weight, residual=one, tile=tile, **options) for one in found]
    (values, squares), again = made
    torch.testing.assert_close(found[0], expected, rtol=2e-5, atol=2e-5)
    near(values, want[0])
    torch.testing.assert_close(squares.sum(0), want[1].sum(0), rtol=2e-5, atol=2e-5)
    assert torch.equal(found[0], found[1])
    assert torch.equal(values, again[0])
    assert torch.equal(squares, again[1])


# Rows, depth, query and key heads, their size, angles; gates behind the queries.
HEAD_SIZES = [
    (256, 2048, 16, 8, 128, 64, False),
    (1024, 1024, 8, 2, 256, 32, True),
    (200, 192, 4, 2, 64, 32, False),
    (130, 64, 3, 1, 128, 16, True),
    (1, 64, 1, 1, 64, 16, False),
]


def heads_of(
    sizes: tuple[int, int, int, int, int, int, bool], parts: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    N, K, heads, kv_heads, D, half, gated = sizes
    torch.manual_seed(N + K)
    x = torch.randn(N, K, device=device).bfloat16()
    size = (heads * (1 + gated) + 2 * kv_heads) * D
    weight = (torch.randn(size, K, device=device) / K**0.5).bfloat16()
    norms = {name: torch.randn(D, device=device).bfloat16() for name in ("q_weight", "k_weight")}
    angles = torch.rand(N, half, device=device) * 6
    options: dict = {**norms, "cos": angles.cos(), "sin": angles.sin(), "num_heads": heads}
    options |= {"num_kv_heads": kv_heads, "eps": 1e-6, "zero_centered": gated, "squares_eps": 1e-6}
    options["squares"] = torch.rand(parts, N, device=device) * K / parts if parts else None
    return x, weight, options


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("parts", [0, 16])
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
def test_heads(sizes: tuple[int, int, int, int, int, int, bool], parts: int, groups: int) -> None:
    x, weight, options = heads_of(sizes, parts, "cuda")
    tile = Tile(groups, sizes[4])
    have = heads_linear_hopper(x, weight, tile=tile, **options)
    again = heads_linear_hopper(x, weight, tile=tile, **options)
    wide = {name: value.float() if torch.is_tensor(value) else value for name, value in options.items()}
    wide |= {name: options[name].bfloat16().float() for name in ("cos", "sin")}
    want = heads_linear_ref(x.float(), weight.float(), **wide)
    for one, two, three in zip(have, again, want):
        if three is None:
            assert one is two is None
            continue
        assert torch.equal(one, two)
        near(one, three)


@pytest.mark.gpu
def test_heads_that_the_kernel_takes() -> None:
    hopper = torch.cuda.get_device_capability()[0] == 9
    x, weight, options = heads_of(HEAD_SIZES[0], 0, "cuda")
    norm, cos = options["q_weight"], options["cos"]
    assert has_heads(x, weight, norm, cos) == hopper
    assert not has_heads(x.repeat(16, 1), weight, norm, cos)
    assert not has_heads(x, weight, norm, cos[:, ::2])
    assert not has_heads(x, weight, norm[:96], cos[:, :48].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(2, 128)], ids=str)
def test_a_chain_in_a_graph(tile: Tile) -> None:
    """Kernels that begin before the one ahead of them ends still see all that it wrote."""
    N, D, inner = 1024, 1024, 3584
    x, up, _ = factors(N, D, 2 * inner, 0)
    down = (torch.randn(D, inner, device="cuda") / inner**0.5).bfloat16()
    options = {
        "norm_weight": torch.zeros(D, device="cuda").bfloat16(),
        "residual": torch.zeros(N, D, device="cuda"),
        "tile": tile,
    }

    def run(wait: Callable[[], None]) -> torch.Tensor:
        options["residual"].zero_()
        rows, squares = x, None
        for _ in range(8):
            rows = linear_swiglu_hopper(rows, up, squares=squares, eps=1e-6)
            wait()
            rows, squares = added_linear_hopper(rows, down, **options)
            wait()
        return rows

    apart = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lambda: None)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, apart)


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_refused() -> None:
    x, weight, _ = factors(128, 192, 128, 0)
    options = {"residual": torch.zeros(128, 128, device="cuda"), "norm_weight": weight[:, 0].contiguous()}
    with pytest.raises(ShapeError, match=r"tile: whole tiles of 256 columns are needed, weight has 128 rows"):
        added_linear_hopper(x, weight, tile=Tile(2, 256), **options)


@pytest.mark.gpu
def test_what_the_kernel_takes() -> None:
    x, weight, _ = factors(1024, 64, 64, 0)
    assert has_joined(x, weight) == (torch.cuda.get_device_capability()[0] == 9)
    assert not has_joined(x[:5], weight)
    assert not has_joined(x.float(), weight)
    assert not has_joined(x[:, 1:], weight[:, 1:])
    assert not has_joined(x, weight[:60])
    assert has_added(x, weight) == has_joined(x, weight)
    assert not has_added(x, weight[:56])


def test_long_sums_of_few_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_joined", lambda x, weight: True)
    for rows, columns, worth in ((256, 6144, False), (256, 4096, True), (512, 6144, True), (128, 3584, True)):
        assert has_added(torch.empty(rows, columns), torch.empty(1024, columns)) == worth


@pytest.mark.parametrize("mode", [PLAIN, GATED, ADDED])
def test_a_tile_is_chosen(mode: int) -> None:
    for N in (1, 128, 1024, 30000):
        for size in (64, 1024, 8256):
            tile = choose_tile(mode, N, size, 1024, 132)
            assert tile in TILES[mode]
            assert mode != ADDED or size % tile.columns == 0
