"""Both attention kernels against the reference; the Hopper kernel needs its GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.attention import beam_attention, decode
from onela.ops.attention.reference import beam_attention_ref
from tests.tolerances import ATTENTION

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@dataclass(frozen=True)
class Sizes:
    """Beams, prompt tokens and depth of each request; heads; page size; rows past the last request; what queries are
    multiplied by."""

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    HQ: int = 4
    HKV: int = 2
    D: int = 16
    page_size: int = 16
    extra: int = 0
    served: bool = True
    sharp: float = 1.0


CASES = {
    "ragged, an empty prompt": Sizes((3, 20, 7), (70, 33, 0), (2, 0, 3), extra=2),
    "three heads a group, odd head size": Sizes(
        (3, 20, 7), (130, 64, 1), (1, 2, 5), HQ=6, D=24, page_size=64
    ),
    "an empty request, one not served": Sizes((9, 0, 4), (17, 5, 40), (1, 0, 2), served=False),
    "one beam, no prompt, no ancestors": Sizes((1,), (0,), (0,), HQ=1, HKV=1),
    "eight heads a group, one past a tile": Sizes((17,), (65,), (1,), HQ=8, HKV=1, D=32, page_size=32),
    "one head a group": Sizes((40, 1), (63, 64), (3, 0), HQ=2, HKV=2),
}


def make_case(sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
    """Pages in random order, NaN behind a prompt's end, ancestors that repeat, every fourth row padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    B, N, page = len(sizes.widths), sum(sizes.widths) + sizes.extra, sizes.page_size
    heads = (sizes.HKV, sizes.D)
    max_pages = max(-(-length // page) for length in sizes.lengths) + 1
    pages = torch.randperm(B * max_pages, generator=generator).reshape(B, max_pages).to(torch.int32)
    k_cache = torch.full((B * max_pages, page, *heads), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    # Request r is served from prompt B - 1 - r.
    lengths = sizes.lengths[::-1]
    for p, length in enumerate(lengths):
        for start in range(0, length, page):
            size = min(page, length - start)
            k_cache[pages[p, start // page], :size] = normal(size, *heads)
            v_cache[pages[p, start // page], :size] = normal(size, *heads)
    prompts = torch.arange(B - 1, -1, -1, dtype=torch.int32)
    if not sizes.served:
        prompts[-1] = -1
    depth = max(sizes.depths)
    places = torch.randperm(N * (depth + 1) + 1, generator=generator).to(torch.int32)
    slots, old = places[:N].clone(), places[N:]
    ancestors = torch.full((N, depth + 1), -1, dtype=torch.int32)
    row = 0
    for width, d in zip(sizes.widths, sizes.depths):
        pick = torch.randint(0, max(1, old.shape[0] // 3), (width, d), generator=generator)
        ancestors[row : row + width, :d] = old[pick]
        row += width
    slots[3::4] = -1
    slots[row:] = -1
    q, k, v = normal(N, sizes.HQ, sizes.D) * sizes.sharp, normal(N, *heads), normal(N, *heads)
    return (q, k, v), {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": pages,
        "prompt_lens": torch.tensor(lengths, dtype=torch.int32),
        "records_k": normal(places.shape[0], *heads),
        "records_v": normal(places.shape[0], *heads),
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": torch.tensor([0, *sizes.widths]).cumsum(0).to(torch.int32),
        "prompts": prompts,
        "depths": torch.tensor(sizes.depths, dtype=torch.int32),
    }


def compare(run: Callable, sizes: Sizes, dtype: torch.dtype, device: torch.device, **options) -> None:
    qkv, arguments = make_case(sizes, dtype)
    # fp32 arithmetic on the same rounded values: what is left is the kernel's own error.
    wide = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
    expected = beam_attention_ref(*(x.float() for x in qkv), **wide)
    arguments = {name: x.to(device) for name, x in arguments.items()}
    got = run(*(x.to(device) for x in qkv), **arguments, **options)
    assert got.dtype == dtype
    name = "fp32" if dtype == torch.float32 else "bf16"
    torch.testing.assert_close(got.float().cpu(), expected, **ATTENTION[name])
    for key in ("records_k", "records_v"):
        assert torch.equal(arguments[key].float().cpu(), wide[key]), key


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_triton(name, block_m, splits, device):
    compare(decode.beam_attention_triton, CASES[name], torch.float32, device, block_m=block_m, splits=splits)


@pytest.mark.parametrize("name", CASES)
def test_triton_half_precision(name, device):
    compare(decode.beam_attention_triton, CASES[name], torch.bfloat16, device)


def test_triton_chooses_its_own_tiles_and_splits(device):
    compare(
        decode.beam_attention_triton,
        Sizes((130,), (1100,), (1,), HQ=2, HKV=2, page_size=64),
        torch.float32,
        device,
    )


def test_splits_change_nothing_but_rounding(device):
    sizes = CASES["ragged, an empty prompt"]
    outputs = []
    for splits in (1, 2, 5):
        qkv, arguments = make_case(sizes, torch.float32)
        arguments = {name: x.to(device) for name, x in arguments.items()}
        run = decode.beam_attention_triton
        outputs.append(run(*(x.to(device) for x in qkv), **arguments, splits=splits, block_m=16))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], **ATTENTION["fp32"])


def test_strided_queries(device):
    """q, k and v as slices of one projection's output."""
    sizes = CASES["ragged, an empty prompt"]
    (q, k, v), arguments = make_case(sizes, torch.float32)
    expected = beam_attention_ref(q, k, v, **{name: x.clone() for name, x in arguments.items()})
    joined = torch.cat([q, k, v], dim=1).flatten(1).to(device)
    arguments = {name: x.to(device) for name, x in arguments.items()}
    split = joined.split([q[0].numel(), k[0].numel(), v[0].numel()], dim=1)
    parts = [part.unflatten(1, (-1, sizes.D)) for part in split]
    got = decode.beam_attention_triton(*parts, **arguments)
    torch.testing.assert_close(got.cpu(), expected, **ATTENTION["fp32"])


def test_refuses_what_it_cannot_do():
    (q, k, v), arguments = make_case(CASES["ragged, an empty prompt"], torch.float32)
    run = decode.beam_attention_triton
    pages = arguments["k_cache"].reshape(-1, 8, *k.shape[1:])
    with pytest.raises(ShapeError, match="page size"):
        run(q, k, v, **(arguments | {"k_cache": pages, "v_cache": pages}))
    with pytest.raises(DtypeError, match="k_cache"):
        run(q.bfloat16(), k, v, **arguments)
    with pytest.raises(ShapeError, match="records_v"):
        run(q, k, v, **(arguments | {"records_v": arguments["records_v"][:-1]}))
    with pytest.raises(DtypeError, match="contiguous"):
        run(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, **arguments)


HOPPER_CASES = {
    "pages of 64": Sizes((3, 70, 7), (200, 64, 1), (2, 0, 3), HQ=8, D=256, page_size=64, extra=2),
    "pages of 128, heads of 128": Sizes((40, 0, 129), (127, 3, 515), (1, 0, 5), HQ=8, D=128, page_size=128),
    "three heads a group, heads of 64": Sizes((9, 60), (640, 63), (4, 1), HQ=6, D=64, page_size=64),
    "no prompt": Sizes((5,), (0,), (0,), HQ=4, D=256, page_size=64),
    "many tiles, deep": Sizes((300, 1, 150), (1000, 70, 130), (6, 1, 3), HQ=8, D=256, page_size=64, extra=3),
    "eight heads a group": Sizes((90, 33), (300, 64), (2, 6), HQ=8, HKV=1, D=128, page_size=64),
    "one head a group, one not served": Sizes(
        (200, 4), (129, 64), (3, 2), HQ=2, D=128, page_size=64, served=False
    ),
    # Every program takes several, with and without rows that fill no warpgroup.
    "more tiles than programs": Sizes(
        (70, 33, 129, 64, 5, 96, 0, 17) * 8,
        (130, 64, 0, 200) * 16,
        (1, 4, 0, 2) * 16,
        HQ=8,
        D=256,
        page_size=64,
    ),
    # Peaks rise by more and by less than what makes the kernel scale its sums.
    "sharp scores": Sizes((70, 9), (700, 130), (3, 1), HQ=8, D=256, page_size=64, sharp=4.0),
    "sharp scores, heads of 128": Sizes((40,), (900,), (2,), HQ=8, D=128, page_size=64, sharp=4.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 3])
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper(name, splits, device):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from onela.ops.attention.decode_hopper import beam_attention_hopper

    compare(beam_attention_hopper, HOPPER_CASES[name], torch.bfloat16, device, splits=splits)


@pytest.mark.gpu
def test_keys_that_begin_anywhere(device):
    """New keys and values that do not begin in a multiple of 16 bytes, which are copied at a time on Hopper."""

    def run(q: Tensor, k: Tensor, v: Tensor, **arguments: Tensor) -> Tensor:
        k, v = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (k, v))
        return beam_attention(q, k, v, **arguments)

    compare(run, HOPPER_CASES["pages of 64"], torch.bfloat16, device)


@pytest.mark.gpu
def test_hopper_splits_hand_over_again_and_again(device):
    """Two splits leave their flags as the next launch needs them, in a graph too."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from onela.ops.attention.decode_hopper import beam_attention_hopper

    qkv, arguments = make_case(HOPPER_CASES["pages of 64"], torch.bfloat16)
    qkv, arguments = [x.to(device) for x in qkv], {name: x.to(device) for name, x in arguments.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = [beam_attention_hopper(*qkv, **arguments, splits=2) for _ in range(20)]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs.append(beam_attention_hopper(*qkv, **arguments, splits=2))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
