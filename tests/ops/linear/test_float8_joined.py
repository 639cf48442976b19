"""Float8 products joined with their neighbours: the references against fp32, and Hopper's kernels against them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onela.errors import DtypeError, ShapeError
from onela.ops.linear import (
    FLOAT8,
    added_linear_float8,
    added_linear_float8_ref,
    float8_linear_swiglu,
    float8_linear_swiglu_ref,
    float8_normed_linear,
    float8_normed_linear_ref,
    has_float8_added,
    has_float8_joined,
    quantize_blocks_ref,
    quantize_rows_ref,
)

BLOCK = 128


def factors(N: int, D: int, size: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Wide rows and weight, then in float8 with their scales."""
    torch.manual_seed(N + D + size)
    x = torch.randn(N, D, device=device).bfloat16()
    weight = (torch.randn(size, D, device=device) / D**0.5).bfloat16()
    return x, weight, *quantize_blocks_ref(x), *quantize_rows_ref(weight)


def wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What rounded rows stand for."""
    return values.float() * scales.t().repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Of all numbers together, as a share."""
    return float((have.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("shape", [(0, 16), (3, 1), (5, 128), (4, 300)], ids=str)
def test_blocks_are_rounded_under_scales_of_their_own(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[:, : BLOCK // 2] *= 1e4
    values, scales = quantize_blocks_ref(x)
    assert (values.dtype, values.shape) == (FLOAT8, x.shape)
    assert scales.shape == (-(-shape[1] // BLOCK), shape[0])
    for block in range(scales.shape[0]):
        part = x[:, block * BLOCK : (block + 1) * BLOCK]
        torch.testing.assert_close(scales[block], part.abs().amax(1) / 448)
        rows, own = quantize_rows_ref(part)
        assert torch.equal(values[:, block * BLOCK : (block + 1) * BLOCK].float(), rows.float())
        torch.testing.assert_close(own[:, 0], scales[block])


def test_zeros_and_bad_numbers() -> None:
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200], x[3, 0] = float("nan"), float("-inf"), 1e-42
    values, scales = quantize_blocks_ref(x)
    assert not values[0].float().any()
    assert torch.isfinite(scales[:, [0, 3]]).all()
    assert torch.isnan(scales[0, 1])
    assert torch.isnan(scales[1, 2])
    assert torch.isfinite(scales[0, 2])
    weight = quantize_rows_ref(torch.ones(8, 256))
    out = float8_normed_linear_ref(values, scales, *weight, out_dtype=torch.float32)
    assert torch.isnan(out[1:3]).all()
    assert not out[0].any()


def test_the_references_are_as_near_as_eight_bits_allow() -> None:
    x, weight, *rounded = factors(33, 300, 256)
    squares, eps = torch.rand(3, 33) * 100, 1e-3
    factor = torch.rsqrt(squares.sum(0) / 300 + eps)[:, None]
    want = x.float() @ weight.float().t() * factor
    have = float8_normed_linear_ref(*rounded, squares=squares, eps=eps, out_dtype=torch.float32)
    assert 0.005 < error(have, want) < 0.06
    # One scale for all columns.
    values, scales = quantize_rows_ref(x)
    row = float8_normed_linear_ref(
        values, scales.t(), *rounded[2:], squares=squares, eps=eps, out_dtype=torch.float32
    )
    assert 0.005 < error(row, want) < 0.06
    gated = wide(*float8_linear_swiglu_ref(*rounded, squares=squares, eps=eps))
    assert 0.005 < error(gated, F.silu(want[:, :128]) * want[:, 128:]) < 0.1
    start, norm = torch.randn(33, 256), torch.randn(256)
    for kind in ((x, None, weight, None), tuple(rounded)):
        residual = start.clone()
        values, scales, sums = added_linear_float8_ref(*kind, residual=residual, norm_weight=norm)
        assert error(residual, start + x.float() @ weight.float().t()) < (
            0.06 if kind[1] is not None else 1e-6
        )
        assert 0.005 < error(wide(values, scales), residual * (1 + norm)) < 0.06
        torch.testing.assert_close(sums.sum(0), residual.square().sum(1))


def test_what_does_not_fit_is_refused() -> None:
    x, weight, *rounded = factors(4, 300, 128)
    values, scales, factor, factor_scales = rounded
    with pytest.raises(ShapeError, match=r"x_scales: expected 1 or 3 rows for 300 columns, got 2"):
        float8_normed_linear(values, scales[:2], factor, factor_scales, out_dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"x_scales: expected shape \[\*, 4\], got \[3, 3\]"):
        float8_linear_swiglu(values, scales[:, :3], factor, factor_scales)
    with pytest.raises(DtypeError, match=r"x: expected torch\.float8_e4m3fn, got torch\.bfloat16"):
        float8_linear_swiglu(x, scales, factor, factor_scales)
    with pytest.raises(ShapeError, match=r"squares: expected shape \[\*, 4\], got \[1, 5\]"):
        float8_linear_swiglu(*rounded, squares=torch.zeros(1, 5))
    norm = {"residual": torch.zeros(4, 64), "norm_weight": torch.ones(128)}
    with pytest.raises(ShapeError, match=r"residual: expected shape \[4, 128\], got \[4, 64\]"):
        added_linear_float8(x, None, weight, None, **norm)


# Rows, depth, columns: more tiles than multiprocessors, one row, ends within tiles and blocks, a single stage.
SIZES = [(1024, 1024, 8224), (1, 192, 2048), (1000, 1040, 1024), (77, 3584, 1024), (2500, 128, 1056)]


def fitting(tiles: tuple, scales: torch.Tensor) -> list:
    """Tiles for rows with so many scales: with one each, which goes to the end, warpgroups share rows alone."""
    from onela.ops.linear.float8_hopper import BY_ROWS

    return [tile for tile in tiles if tile.split == BY_ROWS or len(scales) > 1]


def near(have: torch.Tensor, want: torch.Tensor, share: float) -> None:
    """As a share of the largest, whose sums cancel least."""
    scale = want.float().abs().amax()
    torch.testing.assert_close(have.float() / scale, want.float() / scale, rtol=2**-7, atol=share)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("parts", [0, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_normed(sizes: tuple[int, int, int], parts: int, whole: bool) -> None:
    from onela.ops.linear.float8_hopper import PLAIN, TILES, float8_normed_linear_hopper

    x, _, *rounded = factors(*sizes, "cuda")
    if whole:
        values, scales = quantize_rows_ref(x)
        rounded[:2] = values, scales.t()
    squares = torch.rand(parts, sizes[0], device="cuda") * sizes[1] / parts if parts else None
    options = {"squares": squares, "eps": 1e-6, "out_dtype": torch.bfloat16}
    for tile in fitting(TILES[PLAIN], rounded[1]):
        have, again = (float8_normed_linear_hopper(*rounded, **options, tile=tile) for _ in range(2))
        assert torch.equal(have, again)
        # The tensor cores keep sums to some 14 bits of the largest.
        near(have, float8_normed_linear_ref(*rounded, **options), 2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("parts", [0, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gated(sizes: tuple[int, int, int], parts: int, whole: bool) -> None:
    from onela.ops.linear.float8_hopper import GATED, TILES, float8_linear_swiglu_hopper

    x, _, *rounded = factors(sizes[0], sizes[1], 2 * sizes[2], "cuda")
    if whole:
        values, scales = quantize_rows_ref(x)
        rounded[:2] = values, scales.t()
    squares = torch.rand(parts, sizes[0], device="cuda") * sizes[1] / parts if parts else None
    for tile in fitting(TILES[GATED], rounded[1]):
        have, again = (
            float8_linear_swiglu_hopper(*rounded, squares=squares, eps=1e-6, tile=tile) for _ in range(2)
        )
        assert torch.equal(wide(*have), wide(*again))
        want = float8_linear_swiglu_ref(*rounded, squares=squares, eps=1e-6)
        near(have[1], want[1], 2**-7)
        # One unit of float8 apart where a quotient lies on the border.
        near(wide(*have), wide(*want), 2**-4)
        assert error(wide(*have), wide(*want)) < 2**-5


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("of_float8", [True, False])
@pytest.mark.parametrize("sizes", [(1024, 3584, 1024), (1, 192, 2048), (1000, 64, 1280)], ids=str)
def test_added(sizes: tuple[int, int, int], of_float8: bool, zero_centered: bool) -> None:
    from onela.ops.linear.float8_hopper import ADDED, TILES, added_linear_float8_hopper

    x, weight, *rounded = factors(*sizes, "cuda")
    given = rounded if of_float8 else (x, None, weight, None)
    N, _, size = sizes
    start = torch.randn(N, size + 32, device="cuda")
    options = {"norm_weight": torch.randn(size, device="cuda").bfloat16(), "zero_centered": zero_centered}
    expected = start.clone()[:, :size]
    want = added_linear_float8_ref(*given, residual=expected, **options)
    for tile in TILES[ADDED]:
        found = [start.clone()[:, :size] for _ in range(2)]
        made, again = (
            added_linear_float8_hopper(*given, residual=one, tile=tile, **options) for one in found
        )
        assert torch.equal(found[0], found[1])
        assert torch.equal(made[2], again[2])
        assert torch.equal(wide(*made[:2]), wide(*again[:2]))
        near(found[0], expected, 2**-10)
        torch.testing.assert_close(made[2].sum(0), want[2].sum(0), rtol=2**-10, atol=2e-5)
        near(made[1], want[1], 2**-10)
        near(wide(*made[:2]), wide(*want[:2]), 2**-4)
        assert error(wide(*made[:2]), wide(*want[:2])) < 2**-6


@pytest.mark.gpu
def test_scales_far_apart() -> None:
    """Blocks of zeros, of tiny and of huge numbers, one after the other."""
    from onela.ops.linear.float8_hopper import PLAIN, TILES, float8_normed_linear_hopper

    x, weight, *_ = factors(200, 1024, 512, "cuda")
    for block, factor in ((1, 0.0), (2, 1e-20), (4, 1e10), (6, 1e-35)):
        x[:, block * BLOCK : (block + 1) * BLOCK] *= factor
    x[3], x[7, BLOCK:] = 0, 0
    rounded = (*quantize_blocks_ref(x), *quantize_rows_ref(weight))
    want = float8_normed_linear_ref(*rounded, out_dtype=torch.bfloat16)
    for tile in TILES[PLAIN]:
        have = float8_normed_linear_hopper(*rounded, out_dtype=torch.bfloat16, tile=tile)
        assert not have[3].any()
        for row in (0, 7):
            near(have[row], want[row], 2**-7)


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_refused() -> None:
    from onela.ops.linear.float8_hopper import BY_COLUMNS, Tile, float8_linear_swiglu_hopper

    _, _, *rounded = factors(130, 128, 256, "cuda")
    with pytest.raises(ShapeError, match="tile: two warpgroups share columns only where rows have a scale"):
        float8_linear_swiglu_hopper(*rounded, tile=Tile(2, 256, BY_COLUMNS))


@pytest.mark.gpu
def test_nan_stays_in_its_row() -> None:
    _, _, values, scales, *weight = factors(130, 256, 256, "cuda")
    scales[1, 5] = float("nan")
    if not has_float8_joined(130, weight[0]):
        pytest.skip("joined products are Hopper's")
    _, made = float8_linear_swiglu(values, scales, *weight)
    bad = torch.isnan(made).any(0)
    assert bad[5]
    assert bad.sum() == 1


@pytest.mark.gpu
def test_what_the_kernels_take() -> None:
    hopper = torch.cuda.get_device_capability()[0] == 9
    x, weight, values, _, factor, _ = factors(1024, 64, 128, "cuda")
    assert has_float8_joined(1024, factor) == hopper
    assert not has_float8_joined(5, factor)
    assert not has_float8_joined(1024, weight)
    assert not has_float8_joined(1024, factor[:, :48])
    assert not has_float8_joined(1024, factor[:60])
    assert has_float8_added(x, weight) == has_float8_added(values, factor) == hopper
    assert not has_float8_added(values, factor[:64])


@pytest.mark.gpu
def test_a_chain_in_a_graph() -> None:
    """Kernels that begin before the one ahead of them ends still see all that it wrote."""
    N, D, inner = 1024, 1024, 3584
    _, _, values, scales, *up = factors(N, D, 2 * inner, "cuda")
    down = quantize_rows_ref(torch.randn(D, inner, device="cuda") / inner**0.5)
    if not has_float8_joined(N, up[0]):
        pytest.skip("joined products are Hopper's")
    options = {
        "norm_weight": torch.zeros(D, device="cuda").bfloat16(),
        "residual": torch.zeros(N, D, device="cuda"),
    }

    def run(wait: bool) -> torch.Tensor:
        options["residual"].zero_()
        rows, factor, squares = values, scales, None
        for _ in range(8):
            inside = float8_linear_swiglu(rows, factor, *up, squares=squares, eps=1e-6)
            if wait:
                torch.cuda.synchronize()
            rows, factor, squares = added_linear_float8(*inside, *down, **options)
            if wait:
                torch.cuda.synchronize()
        return wide(rows, factor)

    apart = run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(False)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, apart)


@pytest.mark.parametrize("rows", [1, 128, 1024, 30000])
def test_a_tile_is_chosen(rows: int) -> None:
    pytest.importorskip("triton")
    from onela.ops.linear.float8_hopper import BY_ROWS, TILES, choose_tile, launch_sizes

    for mode, tiles in TILES.items():
        for size in (64, 1024, 8256):
            tile = choose_tile(mode, rows, size, 1024, 132)
            assert tile in tiles
            assert launch_sizes(mode, tile, blocks=True)[1] >= 3
            assert choose_tile(mode, rows, size, 1024, 132, blocks=False).split == BY_ROWS
