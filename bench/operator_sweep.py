"""The operator over 405 shapes, beside the other ways to hold a beam's state: checked, timed, summed up.

R of 4, 8, 16; W of 128, 256, 512; 2 to 6 decode calls; nine geometries. Three commands, so that the time on a GPU is
spent on timing alone:

    python bench/operator_sweep.py prepare      # compiles in many processes; every shape against fp64
    python bench/operator_sweep.py time         # all decode calls of a shape in a CUDA graph
    python bench/operator_sweep.py summarize    # medians and the worst, from the lines of both

`prepare-cuts` and `cuts` hold the kernel's choice of warps, ring and programs against all others on a few shapes.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, append_result, copy_bandwidth, time_events
from bench.operator import (
    ARMS,
    CHECKED,
    OURS,
    TIMED,
    Case,
    Job,
    Problem,
    build,
    compile_all,
    error_limit,
    gate,
    label,
    load_arms,
    reference_outputs,
)
from bench.operator_cuts import cuts
from bench.report import read_results

GEOMETRIES = (
    (4, 4, 128, 128),
    (8, 8, 128, 128),
    (16, 16, 128, 128),
    (32, 32, 128, 128),
    (16, 32, 128, 128),
    (16, 64, 128, 128),
    (16, 16, 128, 256),
    (8, 8, 256, 256),
    (4, 4, 256, 512),
)
"""H, HV, K, V: H 4 to 32, HV 4 to 64, K 128 and 256, V 128 to 512."""

BENCH = "operator_sweep"
COPIED, READ_PARENT, SHARED = "full_state_copy", "full_state_read_parent", "replay_ssm_shared"
BASELINES = (COPIED, READ_PARENT, "full_state_read_parent_bf16", SHARED)
AGAINST = {
    "full_state_copy": (COPIED,),
    "best full_state_read_parent": (READ_PARENT, "full_state_read_parent_bf16"),
    "replay_ssm_shared": (SHARED,),
}
"""What replay is compared with: the fastest of these arms, shape by shape."""

LAUNCH_MS = 0.004
"""What a run may take beside its floor in "the slowest shape": a launch, which no number of bytes accounts for."""


def sweep() -> list[Case]:
    """All 405 shapes, those that take most memory first: what comes later then fits into what is freed."""
    cases = [
        Case(R=R, W=W, H=H, HV=HV, K=K, V=V, O=calls + 1)
        for (H, HV, K, V), calls, W, R in product(GEOMETRIES, range(2, 7), (128, 256, 512), (4, 8, 16))
    ]
    return sorted(cases, key=lambda c: (-c.N * c.HV * c.V * c.K, -c.O))


def floor_bytes(case: Case) -> int:
    return sum(case.call_bytes(t) for t in range(case.O - 1))


def check_shape(job: tuple[str, tuple[Case, ...]]) -> list[dict[str, Any]]:
    """The largest errors of an arm over several cases of the same rows, in a process of its own."""
    name, cases = job
    load_arms()
    found = []
    for case in cases:
        expected = reference_outputs(build(case))
        for record_dtype in ("bfloat16", "float32") if name in OURS else ("bfloat16",):
            checked = replace(case, record_dtype=record_dtype)
            error = gate(name, build(checked), expected)
            found.append(
                {"arm": name, "case": asdict(checked), "value": error, "limit": error_limit(name, checked)}
            )
    torch.cuda.empty_cache()
    return found


def prepare(args: argparse.Namespace) -> None:
    """Compile every kernel of the sweep, then hold every shape of replay, and one of each baseline, against fp64."""
    begin = time.monotonic()
    ours = [name for name in args.arms if name in OURS]
    baselines = [name for name in args.arms if name not in OURS]
    jobs: list[Job] = []
    geometries = [tuple(args.geometry)] if args.geometry else GEOMETRIES
    for H, HV, K, V in geometries:
        small = Case(R=2, W=64, H=H, HV=HV, K=K, V=V)
        for calls in range(1, 7):
            # A state's kernels are the same at every call; calls of the others have kernels of their own.
            names = [name for name in args.arms if calls == 2 or not name.startswith("full_state")]
            case = replace(small, O=calls + 1)
            jobs += [(name, case, (TIMED,) if args.no_check else (TIMED, CHECKED)) for name in names]
            if not args.no_check:
                jobs += [(name, replace(case, record_dtype="float32"), (CHECKED,)) for name in ours]
    compile_all(jobs, args.processes)
    print(f"compiled {len(jobs)} calls in {time.monotonic() - begin:.0f} s", flush=True)
    if args.no_check:
        return
    checks: list[tuple[str, tuple[Case, ...]]] = []
    cases = shard(args)
    for R, W, geometry in product((16, 8, 4), (512, 256, 128), GEOMETRIES):
        same = tuple(c for c in cases if (R, W, geometry) == (c.R, c.W, (c.H, c.HV, c.K, c.V)))
        checks += [(name, same) for name in ours if same]
    for H, HV, K, V in geometries:
        checks += [(name, (Case(R=2, W=128, H=H, HV=HV, K=K, V=V, O=5),)) for name in baselines]
    worst: dict[tuple[str, str], float] = {}
    # Few processes: a reference in fp64 takes up to 12 GB.
    with ProcessPoolExecutor(min(args.processes, 5), mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(check_shape, checks):
            for line in found:
                key = (line["arm"], line["case"]["record_dtype"])
                worst[key] = max(worst.get(key, 0.0), line["value"])
                if not line["value"] <= line["limit"]:
                    print(
                        f"WRONG {line['arm']} {label(Case(**line['case']))}: {line['value']:.2e}", flush=True
                    )
                write(args, **line, metric="max_abs_error", unit="1")
    for (name, record_dtype), value in sorted(worst.items()):
        print(f"{name:30} {record_dtype:9} largest error {value:.2e}", flush=True)
    print(f"checked in {time.monotonic() - begin:.0f} s", flush=True)


def write(args: argparse.Namespace, **line: Any) -> None:
    append_result(BENCH, **line, out=args.out, commit=args.commit, **getattr(args, "measured_on", {}))


def shard(args: argparse.Namespace) -> list[Case]:
    """The cases of this run: every n-th of the sweep, or of one geometry's part of it."""
    index, count = (int(part) for part in args.shard.split("/"))
    wanted = getattr(args, "geometry", None)
    return [c for c in sweep() if wanted in (None, [c.H, c.HV, c.K, c.V])][index::count]


class GraphTimer:
    """Times sequences of calls as CUDA graphs that share one pool of memory, without handing memory back between."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # A pool lives as long as some graph that uses it.
        self.first, _ = self.capture([partial(torch.zeros, 1, device="cuda")])

    def capture(self, calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        """The graph of all calls and what they returned, which must live as long."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                kept = [call() for call in calls]
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph, kept

    def __call__(
        self, calls: Sequence[Callable[[], Any]], *, samples: int, long_us: float = 4000
    ) -> list[float]:
        """Microseconds of running all calls once. A run longer than `long_us` needs no warming up, and is timed twice.

        The kernels must have been loaded before.
        """
        graph, kept = self.capture(calls)
        first = time_events(graph.replay, samples=1, warm=0)
        if first[0] > long_us:
            times = first + time_events(graph.replay, samples=1, warm=0)
        else:
            per_sample = max(1, int(1000 / first[0]))
            times = time_events(graph.replay, samples=samples, per_sample=per_sample, warm=1)
        del kept
        return times


def load_kernels(names: Iterable[str], cases: Iterable[Case]) -> None:
    """Run every arm once for each kernel that the cases need: capture must not meet one that is not loaded."""
    deepest: dict[tuple[int, int, int, int], int] = {}
    for case in cases:
        key = (case.H, case.HV, case.K, case.V)
        deepest[key] = max(deepest.get(key, 0), case.O)
    for (H, HV, K, V), outputs in deepest.items():
        for calls in range(1, outputs):
            small = Case(R=2, W=64, H=H, HV=HV, K=K, V=V, O=calls + 1)
            for name in names:
                for call in ARMS[name](build(small), None)[-2:]:
                    call()
    torch.cuda.synchronize()


def copy_of(problem: Problem) -> Problem:
    """The same problem elsewhere in memory."""
    given = {entry.name: getattr(problem, entry.name) for entry in fields(problem)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = [x.clone() for x in value]
        elif isinstance(value, torch.Tensor):
            given[name] = value.clone()
    return Problem(**given | {"extra": {}})


def time_case(
    case: Case, names: Iterable[str], timer: GraphTimer, samples: int
) -> Iterator[tuple[str, list[float]]]:
    """(arm, microseconds of all decode calls, per sample)."""
    # Several sets of inputs one after the other, so that none finds its own in the L2 cache. Where every beam has a
    # state, a run is many times that cache by itself.
    sets = max(1, min(16, -(-(256 << 20) // floor_bytes(case))))
    problem = build(case)
    problems = [problem] + [copy_of(problem) for _ in range(sets - 1)]
    for name in names:
        chosen = problems[:1] if name.startswith("full_state") else problems
        calls = [call for problem in chosen for call in ARMS[name](problem, None)]
        times = timer(calls, samples=samples)
        del calls  # and with them the arm's states, before the next arm takes memory
        yield name, [x / len(chosen) for x in times]


def run_times(args: argparse.Namespace) -> None:
    """Time every case of this shard, the arms of one shape one after the other."""
    begin = time.monotonic()
    bandwidth = copy_bandwidth()
    cases = shard(args)
    load_kernels(args.arms, cases)
    print(f"copy {bandwidth / 1e12:.2f} TB/s; kernels loaded in {time.monotonic() - begin:.0f} s", flush=True)
    timer = GraphTimer()
    rows: list[tuple[float, str]] = []
    failed = 0
    for done, case in enumerate(cases):
        if time.monotonic() - begin > args.seconds:
            print(f"out of time after {done} of {len(cases)} shapes", flush=True)
            break
        floor = floor_bytes(case) / bandwidth * 1e3
        try:
            for name, samples in time_case(case, args.arms, timer, args.samples):
                value = statistics.median(samples) / 1e3
                write(
                    args, arm=name, case=asdict(case), metric="time", unit="ms", value=value,
                    spread=(min(samples) / 1e3, max(samples) / 1e3), floor=floor,
                )  # fmt: skip
                if name == "replay":
                    rows.append((value / (floor + LAUNCH_MS), f"{label(case)} {value * 1e3:.1f} us"))
        except Exception as error:  # the other cases are still worth their time
            print(f"{label(case)} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
            failed += 1
            torch.cuda.empty_cache()
            if failed > 5:
                sys.exit("too many failures")
    rows.sort(reverse=True)
    for ratio, text in rows[:12]:
        print(f"{ratio:5.2f} times its floor and 4 us: {text}", flush=True)
    print(f"timed {len(rows)} shapes in {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        sys.exit(f"{failed} shapes failed")


CUT_SHAPES = tuple(
    Case(R=R, W=W, H=H, HV=HV, K=K, V=V, O=7)
    for (H, HV, K, V), (R, W) in product(
        ((4, 4, 128, 128), (16, 16, 128, 128)), ((4, 128), (4, 512), (16, 512))
    )
)
"""Where the choice of a cut is held against all cuts: small and large, of the least and the largest heads."""


def prepare_cuts(args: argparse.Namespace) -> None:
    """Compile the cuts' kernels: splits do not change them."""
    jobs: list[Job] = []
    for case in {replace(case, R=2, W=64) for case in CUT_SHAPES}:
        names = ["replay", *cuts(case.K, 1)]
        jobs += [(name, replace(case, O=calls + 1), (TIMED,)) for name in names for calls in range(1, case.O)]
    compile_all(jobs, args.processes)


def run_cuts(args: argparse.Namespace) -> None:
    """Time every cut of a few shapes, and print where the chosen one stands."""
    bandwidth = copy_bandwidth()
    timer = GraphTimer()
    for case in CUT_SHAPES:
        names = ["replay", *cuts(case.K, -(-case.W // 32))]
        found: list[tuple[float, str]] = []
        failed: set[str] = set()
        for name in names:
            kernel = name.rsplit("_splits_")[0]
            if kernel in failed:
                continue
            try:
                if name == "replay" or name.endswith("splits_1"):
                    load_kernels([name], [case])
                found += [(statistics.median(x), of) for of, x in time_case(case, [name], timer, 3)]
            except Exception as error:  # a cut that needs more than there is
                failed.add(kernel)
                print(f"{name} {label(case)}: {type(error).__name__} {str(error)[:80]}", flush=True)
                continue
            append_result(
                "operator_cuts", arm=name, case=asdict(case), metric="time", unit="us", value=found[-1][0],
                floor=floor_bytes(case) / bandwidth * 1e6, out=args.out, commit=args.commit,
            )  # fmt: skip
        if not found or found[0][1] != "replay":
            continue
        chosen = found[0][0]
        best = ", ".join(f"{name.removeprefix('replay_')} {value:.1f}" for value, name in sorted(found)[:4])
        floor = floor_bytes(case) / bandwidth * 1e6
        print(f"{label(case)} floor {floor:.1f}, chosen {chosen:.1f}; best: {best}", flush=True)


def summarize(args: argparse.Namespace) -> None:
    """Lines and a short table of the medians, the slowest shape and the largest errors; fails if shapes are missing."""
    lines = [row for row in read_results(args.results) if row["bench"] == BENCH]
    measured = [row for row in lines if row["metric"] == "time" and row["arm"] == "replay"]
    if measured:
        # The sums are of that machine's and that version's lines, wherever they are summed up.
        args.measured_on = {key: measured[-1][key] for key in ("gpu", "driver", "torch", "triton", "date")}
        args.commit = args.commit or measured[-1]["commit"]
    times: dict[Case, dict[str, dict[str, Any]]] = {}
    for row in lines:
        if row["metric"] == "time":
            times.setdefault(Case(**row["case"]), {})[row["arm"]] = row
    whole = {case: arms for case, arms in times.items() if {"replay", *BASELINES} <= set(arms)}
    print(f"{len(whole)} of {len(sweep())} shapes have all arms")
    for name, arms in AGAINST.items():
        gains = sorted(
            min(rows[arm]["value"] for arm in arms) / rows["replay"]["value"] for rows in whole.values()
        )
        if gains:
            middle = statistics.median(gains)
            print(f"over {name:30} median {middle:6.1f}x, {gains[0]:.1f}x to {gains[-1]:.1f}x")
            write(
                args, arm="replay", case={"shapes": len(gains), "over": name}, metric="median_speedup", unit="x",
                value=middle, spread=(gains[0], gains[-1]),
            )  # fmt: skip
    ours = [rows["replay"] for rows in times.values() if "replay" in rows]
    for allowed, launches in (("a run", False), ("a call", True)):

        def over(row: dict[str, Any], launches: bool = launches) -> float:
            return float(
                row["value"] / (row["floor"] + LAUNCH_MS * (row["case"]["O"] - 1 if launches else 1))
            )

        if ours:
            worst = max(ours, key=over)
            middle = statistics.median(map(over, ours))
            shape = label(Case(**worst["case"]))
            print(
                f"over its floor and 4 us {allowed}: median {middle:.2f}, worst {over(worst):.2f} at {shape}"
            )
            write(
                args, arm="replay", case={"shapes": len(ours), "over": f"floor and 4 us {allowed}"},
                metric="slowest_shape", unit="x", value=over(worst), spread=(min(map(over, ours)), over(worst)),
                shape=worst["case"],
            )  # fmt: skip
    for geometry in GEOMETRIES:
        of_it = [row for row in ours if tuple(row["case"][x] for x in ("H", "HV", "K", "V")) == geometry]
        if of_it:
            ratios = sorted(row["ratio_to_floor"] for row in of_it)
            middle = statistics.median(ratios)
            print(f"{geometry}: over the floor {ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}")
    for record_dtype in ("bfloat16", "float32"):
        errors = [
            row["value"]
            for row in lines
            if row["metric"] == "max_abs_error"
            and row["arm"] == "replay"
            and row["case"]["record_dtype"] == record_dtype
        ]
        if errors:
            print(f"{record_dtype} records: largest error of {len(errors)} shapes {max(errors):.2e}")
            write(
                args, arm="replay", case={"shapes": len(errors), "record_dtype": record_dtype}, metric="worst_error",
                unit="1", value=max(errors),
            )  # fmt: skip
    if len(whole) < len(sweep()):
        sys.exit(f"{len(sweep()) - len(whole)} shapes lack an arm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=("prepare", "time", "summarize", "prepare-cuts", "cuts"))
    parser.add_argument("--arms", nargs="+", default=["replay", *BASELINES])
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th shape, from the i-th on")
    parser.add_argument(
        "--geometry", type=int, nargs=4, default=None, metavar=("H", "HV", "K", "V"), help="only these shapes"
    )
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600, help="begin no further shape after so long")
    parser.add_argument("--no-check", action="store_true", help="prepare: compile only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="summarize: folder of the lines")
    parser.add_argument(
        "--out", type=Path, default=None, help=f"file of results; default bench/results/{BENCH}.jsonl"
    )
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    args = parser.parse_args()
    load_arms()
    if args.phase == "summarize":
        summarize(args)
        return
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    phases = {"prepare": prepare, "time": run_times, "prepare-cuts": prepare_cuts, "cuts": run_cuts}
    phases[args.phase](args)


if __name__ == "__main__":
    # Run as the module that workers import, so that there is one set of arms.
    from bench.operator_sweep import main as run

    run()
