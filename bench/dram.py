"""Bytes that the operator's decode calls move to and from DRAM, read from the GPU's counters by Nsight Compute.

A run's calls go one after the other, as in a decode, the caches full of other, clean lines at the start; then a kernel
that reads a large buffer drives out what the calls have left in the cache, and its writes are counted as theirs.

    python bench/dram.py        # needs `ncu`, and the right to read counters
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import csv
import io
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from bench.common import append_result
from bench.operator import ARMS, Case, build, error_limit, gate, label, load_arms, reference_outputs

READ, WRITTEN, STORED = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors_op_write.sum"
MIB = 2**20


def profiled(names: list[str], case: Case) -> None:
    """What Nsight Compute watches: every arm's calls, each time followed by the kernel that empties the cache."""
    load_arms()
    expected = reference_outputs(build(case))
    arms = []
    for name in names:
        error = gate(name, build(case), expected)
        if not error <= error_limit(name, case):
            sys.exit(f"{name} {label(case)}: wrong, error {error:.2e}; not measured")
        arms.append(ARMS[name](build(case), None))
    other = torch.zeros(1 << 28, device="cuda")
    for calls in arms:
        for call in calls:
            call()
    other.amax()
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()
    cudart.cudaProfilerStart()
    # The profiler's own dirty lines must not count as the first arm's.
    other.amax()
    for calls in arms:
        for call in calls:
            call()
        other.amax()
    torch.cuda.synchronize()
    cudart.cudaProfilerStop()


def read_counters(text: str) -> list[dict[str, float]]:
    """What `ncu --csv --page raw` says of every arm, in bytes: read, written (also behind it), stored to the cache.

    A kernel whose name has "replay" in it is one of an arm's calls; those that follow drive out what it left. Kernels
    before the first arm do not count.
    """
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    # The first row holds the units.
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))[1:]
    arms: list[dict[str, float]] = []
    behind = True
    for row in rows:
        read, written, stored = (float(row[name].replace(",", "")) for name in (READ, WRITTEN, STORED))
        is_call = "replay" in row["Kernel Name"]
        if is_call and behind:
            arms.append({"calls": 0, "read": 0, "written": 0, "stored": 0})
        behind = not is_call
        if not arms:
            continue
        arms[-1]["written"] += written
        if is_call:
            arms[-1]["calls"] += 1
            arms[-1]["read"] += read
            arms[-1]["stored"] += stored * 32
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["replay", "replay_last_unwritten"])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=3)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=None, help="file of results; default bench/results/dram.jsonl"
    )
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    args = parser.parse_args()
    case = Case(R=args.requests, W=args.width, O=args.outputs)
    if args.profiled:
        profiled(args.arms, case)
        return
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += [
        "--clock-control",
        "none",
        "--cache-control",
        "none",
        "--metrics",
        f"{READ},{WRITTEN},{STORED}",
    ]
    command += [sys.executable, __file__, *sys.argv[1:], "--profiled"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ncu failed: {(done.stdout + done.stderr)[-1500:]}")
    floor = sum(case.call_bytes(t) for t in range(case.O - 1)) / MIB
    found = read_counters(done.stdout)
    if [arm["calls"] for arm in found] != [case.O - 1] * len(args.arms):
        sys.exit(f"expected {case.O - 1} kernels of each arm, got {found}")
    for name, arm in zip(args.arms, found):
        read, written, stored = (arm[key] / MIB for key in ("read", "written", "stored"))
        append_result(
            "dram", arm=name, case=asdict(case), metric="dram", unit="MiB", value=read + written, floor=floor,
            read=read, written=written, stored_to_cache=stored, out=args.out, commit=args.commit,
        )  # fmt: skip
        print(
            f"{name:24} {label(case)} {read + written:7.1f} MiB: {read:.1f} read, {written:.1f} written "
            f"({stored:.1f} stored to the cache); counted floor {floor:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    from bench.dram import main as run

    run()
