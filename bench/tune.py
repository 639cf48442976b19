"""Time several cuts of the portable kernels on this GPU, each against the byte floor; nothing is chosen by itself.

Cuts are compiled by several processes first, so that a run is spent on timing.

    python bench/tune.py --what replay full_state replay_ssm
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import torch

from bench.common import Failures, append_result, copy_bandwidth, time_graph
from bench.operator import Case, build, records, step_index
from onela.ops.gated_delta._launch import ReplayConfig
from onela.ops.gated_delta.full_state import launch_full_state
from onela.ops.gated_delta.layer_step import gated_delta_layer_step_triton, launch_conv_gates
from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.reference import (
    full_state_step_ref,
    replay_ssm_step_ref,
    replay_step_ref,
    split_state,
)
from onela.ops.gated_delta.replay import launch_replay
from onela.ops.gated_delta.replay_ssm import launch_replay_ssm
from onela.ops.short_conv.reference import short_conv_step_ref

Item = tuple[str, dict, dict, Callable[[], torch.Tensor], float, Callable[[], torch.Tensor]]
"""what, case, cut, one call, bytes it must move, the first rows of what it must give."""

FEW = 64
"""Rows that are checked where the reference would take the memory of all states."""

REPLAY_CUTS = [
    *(ReplayConfig(prefetch=p, overlap=o) for p in (False, True) for o in (False, True)),
    ReplayConfig(overlap=True, programs_per_sm=1),
    ReplayConfig(block_w=16, overlap=True),
]
SMALL_HEAD_CUTS = [
    ReplayConfig(block_w=w, num_warps=n, programs_per_sm=p, prefetch=True, overlap=True)
    for w, n, p in (
        (32, 4, 2),
        (32, 4, 4),
        (32, 2, 4),
        (32, 2, 8),
        (64, 4, 2),
        (64, 4, 4),
        (64, 8, 2),
        (16, 1, 8),
    )
]
CONV_CUTS = [
    {"block_w": w, "num_warps": n, "programs_per_sm": p, "max_channels": c}
    for w, n, c in ((8, 2, 256), (8, 1, 128), (4, 1, 256))
    for p in (32, 64)
]


def replay_items(
    shapes: list[tuple[int, int]],
    calls: tuple[int, ...],
    size: int = 128,
    cuts: list[ReplayConfig] = REPLAY_CUTS,
) -> Iterator[Item]:
    for R, W in shapes:
        case = Case(R=R, W=W, K=size, V=size, O=max(calls) + 2)
        problem = build(case)
        kept = records(problem, torch.bfloat16, torch.bfloat16, torch.float32)
        kept["records_g"].normal_().abs_().mul_(-0.3)
        kept["records_delta"].normal_().mul_(0.1)
        kept["records_k"].normal_()
        state = split_state(problem.state)
        for t in calls:
            rows = (problem.q[t], None, problem.v[t], problem.g[t], problem.beta[t])
            index = step_index(problem, t)
            wanted = partial(replay_step_ref, *rows, recurrent_state=state, **kept, **index)
            wanted = lru_cache(wanted)
            floor = case.call_bytes(t) - case.N * case.H * case.K * 2
            for cut in cuts:
                call = partial(
                    launch_replay,
                    *rows,
                    recurrent_state=state,
                    **kept,
                    **index,
                    scale=None,
                    out_dtype=None,
                    config=cut,
                )
                heads = {} if size == 128 else {"K": size, "V": size}
                yield "replay", {"R": R, "W": W, "t": t, **heads}, asdict(cut), call, floor, wanted


def full_state_few(rows: list, states: torch.Tensor, prompt: torch.Tensor, index: tuple) -> torch.Tensor:
    """What the reference gives for the first rows, whose new states it writes too."""
    read, write, row_prompts = (x[:FEW] for x in index)
    return full_state_step_ref(
        *(x[:FEW] for x in rows), states=states, recurrent_state=prompt, read_rows=read, write_rows=write,
        row_prompts=row_prompts,
    )  # fmt: skip


def replay_ssm_few(
    rows: list, checkpoints: torch.Tensor, checkpoint_rows: torch.Tensor, buffers: tuple, own: tuple
) -> torch.Tensor:
    return replay_ssm_step_ref(
        *(x[:FEW] for x in rows), checkpoints=checkpoints, checkpoint_rows=checkpoint_rows[:FEW], buffer_g=buffers[0],
        buffer_delta=buffers[1], buffer_k=buffers[2], rows=own[0][:FEW], row_depths=own[1][:FEW],
    )  # fmt: skip


def full_state_items(shapes: list[tuple[int, int]]) -> Iterator[Item]:
    for (R, W), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        case = Case(R=R, W=W)
        problem = build(case)
        N = case.N
        states = torch.empty(2 * N, case.HV, case.V, case.K, dtype=dtype, device="cuda").normal_()
        rows = [x[0] for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
        here = torch.arange(N, dtype=torch.int32, device="cuda")
        prompts = here // W
        starts = (torch.full_like(here, -1), here, prompts)
        moves = (problem.parents[0], here + N, prompts)
        size = N * case.HV * case.V * case.K * states.element_size()
        for block_v, warps in itertools.product((16, 32, 64, 128), (1, 2, 4, 8)):
            if block_v * case.K // (32 * warps) > 128:
                continue
            launch = partial(
                launch_full_state, *rows, states, problem.state, scale=None, block_v=block_v, num_warps=warps
            )
            first = partial(launch, *starts, out_dtype=None)
            second = partial(launch, *moves, out_dtype=None)
            name = {"R": R, "W": W, "dtype": str(dtype)}
            cut = {"block_v": block_v, "num_warps": warps}
            yield (
                "full_state_first",
                name,
                cut,
                first,
                size,
                partial(full_state_few, rows, states, problem.state, starts),
            )
            yield (
                "full_state_read_parent",
                name,
                cut,
                second,
                2 * size,
                partial(full_state_few, rows, states, problem.state, moves),
            )
        del states


def replay_ssm_items(
    shapes: list[tuple[int, int]], sharing: tuple[bool, ...] = (True, False), depths: tuple[int, ...] = (0, 1)
) -> Iterator[Item]:
    for (R, W), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        case = Case(R=R, W=W)
        problem = build(case)
        N, T = case.N, max(4, max(depths) + 1)
        states = torch.empty(N, case.HV, case.V, case.K, dtype=dtype, device="cuda").normal_()
        rows = [x[0] for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
        buffers = (
            -torch.rand(N, T, case.HV, device="cuda"),
            torch.randn(N, T, case.HV, case.V, device="cuda", dtype=torch.bfloat16),
            torch.randn(N, T, case.H, case.K, device="cuda", dtype=torch.bfloat16),
        )
        here = torch.arange(N, dtype=torch.int32, device="cuda")
        for shared, depth, block_v, warps in itertools.product(sharing, depths, (8, 16, 32, 64), (1, 2, 4)):
            if block_v * case.K // (32 * warps) > 128:
                continue
            checkpoints = problem.state.to(dtype) if shared else states
            of = here // W if shared else here
            own = (here, torch.full_like(here, depth))
            call = partial(
                launch_replay_ssm,
                *rows,
                checkpoints,
                of,
                *buffers,
                *own,
                None,
                None,
                block_v=block_v,
                num_warps=warps,
            )
            size = checkpoints.numel() * checkpoints.element_size()
            name = {"R": R, "W": W, "dtype": str(dtype), "shared": shared, "t": depth}
            cut = {"block_v": block_v, "num_warps": warps}
            yield (
                "replay_ssm",
                name,
                cut,
                call,
                size,
                partial(replay_ssm_few, rows, checkpoints, of, buffers, own),
            )
        del states


def layer_items(shapes: list[tuple[int, int]], calls: tuple[int, ...]) -> Iterator[Item]:
    """The layer step, and its first launch alone, whose bytes are those of its own inputs and outputs."""
    for (R, W), t in itertools.product(shapes, calls):
        case = Case(R=R, W=W, O=t + 2)
        problem = build(case)
        N, HV, C = case.N, case.HV, 2 * case.H * case.K + case.HV * case.V
        bf16 = torch.bfloat16

        def normal(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(dtype)

        kept = records(problem, bf16, bf16, torch.float32)
        kept = {name: x.normal_().mul_(0.1) for name, x in kept.items()} | {
            "records_x": normal(N * (t + 1), C)
        }
        kept["records_g"].abs_().neg_()
        inputs = {"mixed_qkv": normal(N, C), "b": normal(N, HV), "a": normal(N, HV)}
        weights = {"conv_weight": normal(C, 4), "A_log": normal(HV).float(), "dt_bias": normal(HV).float()}
        conv_state, z, norm = normal(R, C, 3), normal(N, HV * case.V), normal(case.V)
        index = step_index(problem, t)
        conv = partial(
            launch_conv_gates, **inputs, **weights, conv_state=conv_state, records_x=kept["records_x"],
            records_k=kept["records_k"], **index, HV=HV,
        )  # fmt: skip
        wanted = lru_cache(
            partial(
                short_conv_step_ref, inputs["mixed_qkv"], weights["conv_weight"], conv_state=conv_state,
                records_x=kept["records_x"].clone(), **index,
            )
        )  # fmt: skip
        name = {"R": R, "W": W, "t": t}
        moved = N * 2 * C * (3 + min(t, 3)) + 4 * N * HV * 3
        QK = case.H * case.K
        for cut in CONV_CUTS:
            first = partial(first_of, partial(conv, **cut))
            yield (
                "conv_gates",
                name,
                cut,
                first,
                moved,
                partial(without_keys, wanted, QK),
            )
        step = partial(
            gated_delta_layer_step_triton, **inputs, z=z, **weights, norm_weight=norm, norm_eps=1e-6,
            recurrent_state=split_state(problem.state), conv_state=conv_state, **kept, **index,
        )  # fmt: skip
        whole = partial(
            gated_delta_layer_step_ref, **inputs, z=z, **weights, norm_weight=norm, norm_eps=1e-6,
            recurrent_state=problem.state, conv_state=conv_state, **{k: x.clone() for k, x in kept.items()}, **index,
        )  # fmt: skip
        least = N * 2 * (C * (2 + min(t, 3)) + 2 * HV + 2 * HV * case.V)
        record = QK * 2 + HV * case.V * 2 + HV * 4
        least += N * record * (1 + t) + R * HV * case.V * case.K * 4
        yield "layer_step", name, {}, step, least, whole


def without_keys(call: Callable[[], torch.Tensor], QK: int) -> torch.Tensor:
    mixed = call()
    return torch.cat([mixed[:, :QK], mixed[:, 2 * QK :]], 1)


def first_of(call: Callable[[], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return call()[0]


def items(what: list[str], *, small: bool) -> Iterator[Item]:
    """Every case and cut; `small` ones compile to the same kernels and take little memory."""
    if "replay" in what:
        yield from replay_items([(16, 64)] if small else [(16, 512), (4, 512), (4, 256)], (0, 1, 5))
    if "small_heads" in what:
        for size in (64, 32):
            shapes = [(16, 64)] if small else [(16, 512), (4, 512)]
            yield from replay_items(shapes, (0, 5), size, SMALL_HEAD_CUTS)
    if "layer_step" in what:
        yield from layer_items([(16, 64)] if small else [(16, 512), (16, 256), (4, 512), (4, 256)], (0, 1, 3))
    if "full_state" in what:
        yield from full_state_items([(2, 64)] if small else [(4, 256), (16, 512)])
    if "replay_ssm_shared_deep" in what:
        yield from replay_ssm_items([(2, 64)] if small else [(4, 256)], (True,), (5,))
    if "replay_ssm" in what:
        yield from replay_ssm_items([(2, 64)] if small else [(4, 256), (16, 512)])


def compile_share(what: list[str], share: int, shares: int) -> None:
    for i, (*_, call, _, _) in enumerate(items(what, small=True)):
        if i % shares == share:
            call()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", default=["replay", "full_state", "replay_ssm"])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--best", type=int, default=6, help="cuts to print per case")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_share, args=(args.what, i, args.processes))
        for i in range(args.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    bandwidth = copy_bandwidth()
    failures = Failures()
    found: dict[tuple[str, str], list[tuple[float, dict, float]]] = {}
    for what, case, cut, call, size, reference in items(args.what, small=False):
        wanted = reference().float()
        call_gives = call()[: len(wanted)].float()
        if not torch.allclose(call_gives, wanted, rtol=2**-6, atol=0.1 if what == "layer_step" else 4e-3):
            failures.add(f"{what} {case} {cut}", f"off by {(call_gives - wanted).abs().max().item()}")
            continue
        times = time_graph([call] * 4, samples=7, target_us=1000)
        value, floor = statistics.median(times) / 4, size / bandwidth * 1e6
        found.setdefault((what, str(case)), []).append((value, cut, floor))
        if args.out:
            append_result(
                "tune",
                arm=what,
                case={**case, **cut},
                metric="time",
                unit="us",
                value=value,
                floor=floor,
                out=args.out,
                commit=args.commit,
            )
    for (what, case), results in found.items():
        print(what, case, f"floor {results[0][2]:.1f} us")
        results.sort(key=lambda result: result[0])
        for value, cut, floor in results[: args.best]:
            print(
                f"    {value:8.1f} us {value / floor:6.2f}  " + " ".join(f"{k}={v}" for k, v in cut.items())
            )
    failures.exit()


if __name__ == "__main__":
    main()
