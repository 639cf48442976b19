"""A decode step's matrix products joined with norms, gates and sums, beside the ops apart: checked first, then timed.

A run is one such product on each of several weights, in one CUDA graph, so that it does not find its weight in the L2
cache. `apart` is torch's own product with the launches around it. Four kinds of product:

    in      rows under a norm, to the mixer's inputs; apart: the product alone, its norm is counted with `out`
    heads   rows under a norm, to queries and keys, normed and rotated, and values; apart: the product, then one launch
    gate    rows under a norm, to `silu(gate) * up`; apart: the product and the gate
    out     to the residual stream, and the norm of the sum begun; apart: the product and the norm, with its sum

With `--dtype float8` rows and weights are float8, apart as `torch._scaled_mm` takes them (a scale a row; `gate` and
`out` round what they make), joined in blocks; `heads` are a product and a launch in either. The mixers' projections to
the stream stay bf16, and what they make is rounded.

    python bench/products.py [--models 0.8b 1.7b] [--rows 1024 256] [--tiles] [--dtype float8]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import Failures, append_result, machine, time_graph
from onela.ops.linear import (
    added_linear_float8_ref,
    added_linear_ref,
    float8_linear_swiglu_ref,
    float8_normed_linear_ref,
    heads_linear_ref,
    linear_swiglu,
    linear_swiglu_ref,
    normed_linear_ref,
    quantize_blocks_ref,
    quantize_rows,
    rms_norm_float8,
    swiglu_float8,
)
from onela.ops.norm import qk_norm_rotary, rms_norm, swiglu

WEIGHTS = 12
PARTS = 16
"""Pieces whose sums of squares a norm's factor is made of."""
LIMIT = {"rtol": 2**-5, "atol": 2**-9}
"""As in the tests, relative to the largest number: rounding to bf16, at other places."""


class Product(NamedTuple):
    """One product of a layer: [rows, depth] times [size, depth]^T."""

    name: str
    kind: str
    size: int
    depth: int


MODELS: dict[str, tuple[Product, ...]] = {
    "qwen3.5-0.8b": (
        Product("in_proj", "in", 8224, 1024),
        Product("qkv_proj", "heads", 5120, 1024),
        Product("out_proj", "out", 1024, 2048),
        Product("gate_up_proj", "gate", 7168, 1024),
        Product("down_proj", "out", 1024, 3584),
    ),
    "qwen3-1.7b": (
        Product("qkv_proj", "heads", 4096, 2048),
        Product("o_proj", "out", 2048, 2048),
        Product("gate_up_proj", "gate", 12288, 2048),
        Product("down_proj", "out", 2048, 6144),
    ),
}

HEADS = {"qwen3.5-0.8b": (8, 2, 256, 32), "qwen3-1.7b": (16, 8, 128, 64)}
"""Query and key heads of a model, their size, and angles of a row."""

WIDE = ("out_proj", "o_proj")
"""Products that float8 leaves in bf16."""

Run = Callable[[Any], Any]


class Problem:
    """The rows of one product, and the ways to run it."""

    def __init__(self, model: str, product: Product, rows: int) -> None:
        torch.manual_seed(0)
        self.product, self.rows = product, rows
        self.heads, self.kv_heads, head_dim, half = HEADS[model]
        self.gated = product.size > (self.heads + 2 * self.kv_heads) * head_dim
        angles = torch.rand(rows, half, device="cuda") * 6
        self.norms: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin(), "eps": 1e-6}
        for name in ("q_weight", "k_weight"):
            self.norms[name] = torch.randn(head_dim, device="cuda").bfloat16()
        self.x = torch.randn(rows, product.depth, device="cuda").bfloat16()
        self.squares = torch.rand(PARTS, rows, device="cuda") * product.depth / PARTS
        self.residual = torch.zeros(rows, product.size, device="cuda")
        self.norm = torch.randn(product.size, device="cuda").bfloat16()

    def weight(self) -> Tensor:
        """Another one every time."""
        size, depth = self.product.size, self.product.depth
        return (torch.randn(size, depth, device="cuda") / depth**0.5).bfloat16()

    def apart(self, weight: Tensor) -> Any:
        """torch's product, and the launches beside it."""
        o = F.linear(self.x, weight)
        if self.product.kind == "heads":
            return self.finish_heads(o)
        if self.product.kind == "gate":
            return swiglu(o)
        if self.product.kind == "out":
            return rms_norm(o, self.norm, eps=1e-6, residual=self.residual)
        return o

    def finish_heads(self, o: Tensor) -> Any:
        """Norms and rotations of queries and keys."""
        o = o.view(self.rows, -1, self.norms["q_weight"].shape[0])
        q = o[:, : 2 * self.heads : 2] if self.gated else o[:, : self.heads]
        return qk_norm_rotary(q, o[:, -2 * self.kv_heads : -self.kv_heads], **self.norms)

    def joined(self, tile: Any) -> Run:
        """One launch. `tile`: None is the kernel's own choice."""
        from onela.ops.linear import joined_hopper as hopper

        if self.product.kind == "out":
            return lambda weight: hopper.added_linear_hopper(
                self.x,
                weight,
                residual=self.residual,
                norm_weight=self.norm,
                tile=tile,
            )
        if self.product.kind == "heads":
            return lambda weight: hopper.heads_linear_hopper(self.x, weight, **self.head_options(), tile=tile)
        if self.product.kind == "gate" and tile is None:
            return lambda weight: linear_swiglu(self.x, weight, squares=self.squares, eps=1e-6)
        run = hopper.linear_swiglu_hopper if self.product.kind == "gate" else hopper.normed_linear_hopper
        return lambda weight: run(self.x, weight, squares=self.squares, eps=1e-6, tile=tile)

    def head_options(self) -> dict[str, Any]:
        """Of `heads_linear`."""
        squares = {"squares": self.squares, "squares_eps": 1e-6}
        return {**self.norms, **squares, "num_heads": self.heads, "num_kv_heads": self.kv_heads}

    def check(self, run: Run) -> None:
        """Hold a run against the reference. Raises `AssertionError`."""
        weight = self.weight()
        self.residual.normal_()
        before = self.residual.clone()
        given = run(weight)
        if self.product.kind == "out":
            wanted = added_linear_ref(self.x, weight, residual=before, norm_weight=self.norm)
            torch.testing.assert_close(self.residual, before, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(given[1].sum(0), wanted[1].sum(0), rtol=2e-5, atol=2e-5)
            given, want = given[0], wanted[0]
        elif self.product.kind == "heads":
            options = self.head_options()
            wanted = heads_linear_ref(self.x, weight, **options)
            given, want = (
                torch.cat([part for part in parts if part is not None], 1) for parts in (given, wanted)
            )
        else:
            reference = linear_swiglu_ref if self.product.kind == "gate" else normed_linear_ref
            want = reference(self.x, weight, squares=self.squares, eps=1e-6)
        scale = want.float().abs().max()
        torch.testing.assert_close(given.float() / scale, want.float() / scale, **LIMIT)


class Float8Problem(Problem):
    """The same in float8: weights are pairs of values and scales, or bf16 where the product stays so."""

    def __init__(self, model: str, product: Product, rows: int) -> None:
        super().__init__(model, product, rows)
        self.wide = product.name in WIDE
        self.whole = quantize_rows(self.x)
        self.blocks = (self.x, None) if self.wide else quantize_blocks_ref(self.x)
        self.squares = self.squares[: self.product.depth // 128]

    def weight(self) -> Any:
        weight = super().weight()
        return (weight, None) if self.wide else quantize_rows(weight)

    def apart(self, weight: Any) -> Any:
        """torch's product, and the launches beside it, which round."""
        if self.wide:
            o = F.linear(self.x, weight[0])
        else:
            from onela.ops.linear.kernels import float8_linear_scaled

            o = float8_linear_scaled(*self.whole, *weight, out_dtype=torch.bfloat16)
        if self.product.kind == "heads":
            return self.finish_heads(o)
        if self.product.kind == "gate":
            return swiglu_float8(o)
        if self.product.kind == "out":
            return rms_norm_float8(o, self.norm, eps=1e-6, residual=self.residual)
        return o

    def joined(self, tile: Any) -> Run:
        from onela.ops.linear import float8_hopper as hopper

        finish = {"squares": self.squares, "eps": 1e-6, "tile": tile}
        if self.product.kind == "out":
            return lambda weight: hopper.added_linear_float8_hopper(
                *self.blocks, *weight, residual=self.residual, norm_weight=self.norm, tile=tile
            )
        if self.product.kind == "gate":
            return lambda weight: hopper.float8_linear_swiglu_hopper(*self.blocks, *weight, **finish)

        def product(weight: Any) -> Tensor:
            return hopper.float8_normed_linear_hopper(
                *self.blocks, *weight, **finish, out_dtype=torch.bfloat16
            )

        if self.product.kind == "heads":
            return lambda weight: self.finish_heads(product(weight))
        return product

    def check(self, run: Run) -> None:
        weight = self.weight()
        self.residual.normal_()
        before = self.residual.clone()
        given = run(weight)
        factors = (*self.blocks, *weight)
        if self.product.kind == "out":
            values, scales, _ = added_linear_float8_ref(*factors, residual=before, norm_weight=self.norm)
            near(self.residual, before, 2**-10)
            given, want = unrounded(*given[:2]), unrounded(values, scales)
        elif self.product.kind == "gate":
            given = unrounded(*given)
            want = unrounded(*float8_linear_swiglu_ref(*factors, squares=self.squares, eps=1e-6))
        else:
            want = float8_normed_linear_ref(
                *factors, squares=self.squares, eps=1e-6, out_dtype=torch.bfloat16
            )
            if self.product.kind == "heads":
                given, want = (torch.cat(parts, 1) for parts in (given, self.finish_heads(want)))
        # Where a result is float8, one unit of its last place.
        near(given, want, 2**-4 if self.product.kind in ("gate", "out") else 2**-7)


def unrounded(values: Tensor, scales: Tensor) -> Tensor:
    """What rows in float8 stand for."""
    return values.float() * scales.t().repeat_interleave(128, 1)[:, : values.shape[1]]


def near(given: Tensor, want: Tensor, share: float) -> None:
    """Raise `AssertionError` unless every number is given to this share of the largest."""
    scale = want.float().abs().max()
    torch.testing.assert_close(given.float() / scale, want.float() / scale, rtol=LIMIT["rtol"], atol=share)


def tile_name(tile: Any) -> str:
    """Rows and columns of a tile, and how two warpgroups share float8's."""
    split = getattr(tile, "split", 0)
    return f"{tile.rows if split else 64 * tile.groups}x{tile.columns}" + f"/{split}" * (split > 0)


def measure(model: str, product: Product, rows: int, failures: Failures, args: argparse.Namespace) -> None:
    """A line for every way to run one product."""
    from onela.ops.linear import float8_hopper, joined_hopper

    float8 = args.dtype == "float8"
    problem = (Float8Problem if float8 else Problem)(model, product, rows)
    hopper: Any = float8_hopper if float8 else joined_hopper
    heads = hopper.PLAIN if float8 else hopper.HEADS
    mode = {"in": hopper.PLAIN, "gate": hopper.GATED, "out": hopper.ADDED, "heads": heads}[product.kind]
    size = product.size // 2 if product.kind == "gate" else product.size
    arms: dict[str, Run] = {"apart": problem.apart, "joined": problem.joined(None)}
    if args.tiles:
        head_dim = problem.norms["q_weight"].shape[0]
        for tile in hopper.TILES.get(mode) or [joined_hopper.Tile(groups, head_dim) for groups in (1, 2)]:
            if mode != hopper.ADDED or size % tile.columns == 0:
                arms[tile_name(tile)] = problem.joined(tile)
    weights = [problem.weight() for _ in range(WEIGHTS)]
    peak = args.peak * (2 if float8 and product.name not in WIDE else 1)
    ideal = 2 * rows * product.size * product.depth / peak / 1e6
    case = {"model": model, "product": product.name, "rows": rows, "dtype": args.dtype}
    for arm, run in arms.items():
        try:
            if arm != "apart":
                problem.check(run)
            calls = [lambda run=run, weight=weight: run(weight) for weight in weights]
            times = [taken / WEIGHTS for taken in time_graph(calls, samples=args.samples, target_us=1000)]
        except Exception as error:  # the other arms are still worth their time
            failures.add(f"{product.name} {rows} {arm}", repr(error))
            continue
        value = statistics.median(times)
        append_result(
            "products", arm=arm, case=case, metric="time", unit="us", value=value, spread=[min(times), max(times)],
            floor=ideal, out=args.out, commit=args.commit,
        )  # fmt: skip
        print(f"{model} {product.name:12s} {rows:5d} rows  {arm:10s} {value:7.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--tiles", action="store_true", help="every tile, not the chosen one alone")
    parser.add_argument("--dtype", choices=["bfloat16", "float8"], default="bfloat16")
    parser.add_argument(
        "--peak",
        type=float,
        default=790.0,
        help="TFLOP/s that the floor is made of; float8's are twice as many",
    )
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(machine(), flush=True)
    failures = Failures()
    for model in args.models:
        for rows in args.rows:
            for product in MODELS[model]:
                measure(model, product, rows, failures, args)
                torch.cuda.empty_cache()
    failures.exit()


if __name__ == "__main__":
    main()
