"""The fused layer step, from the raw in-projection to the input of the out-projection: checked first, then timed.

A case is R requests of W beams with random parents, sorted within the request, at the decode call that replays t
records. A run is one such call on each of several sets of inputs, so that it does not find its inputs in the L2 cache,
over and over in one CUDA graph of at least 32 launches: a decode step's graph holds hundreds, and with few the gap of
some 6 us between two replays of the graph is counted as the launch's. The floor is what one launch must move at least
over the copy bandwidth of the same process: the rows and the output, the ancestors' inputs in the window, every record
read and written, the states.

    python bench/layer_step.py                     # R of 16 and 4, W of 512 and 256, t = 0 to 5, all arms
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import append_result, commit, copy_bandwidth, machine, time_graph
from bench.operator import Case, build, records, step_index
from onela.ops.gated_delta.layer_step import gated_delta_layer_step_triton, launch_pair
from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.reference import split_state

KERNEL_SIZE = 4
MIN_LAUNCHES = 32
"""Of one graph."""
LIMIT = {"rtol": 2**-5, "atol": 2e-2}
"""As in the tests: q, k and v are rounded to bf16 before replay, and the norm divides by what follows."""

Step = Callable[..., Tensor]


def one_launch(*rows: Tensor, **layer: Any) -> Tensor:
    from onela.ops.gated_delta.layer_step_hopper import launch_layer_hopper, supports_layer_hopper

    if not supports_layer_hopper(*rows[:2], **layer):
        raise ImportError("needs a Hopper GPU, K = V = 128 and bf16")
    return launch_layer_hopper(*rows, **layer)


ARMS: dict[str, Step] = {
    "one_launch": one_launch,
    "pair": launch_pair,
    "layer_step": gated_delta_layer_step_triton,
}
"""`layer_step` is the op as the engine calls it: the first of the others that can."""


def problem(case: Case, t: int, seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """One call's rows and everything else it takes; records of the calls before it are random."""
    built = build(case, seed)
    N, HV, C = case.N, case.HV, 2 * case.H * case.K + case.HV * case.V
    gen = torch.Generator("cuda").manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda").to(torch.bfloat16)

    kept = records(built, getattr(torch, case.record_dtype), torch.bfloat16, torch.float32)
    for name, tensor in kept.items():
        tensor.normal_(generator=gen).mul_(0.1)
        if name == "records_g":
            tensor.abs_().neg_()
    kept["records_x"] = normal(N * (t + 1), C)
    # Slices of one fused projection, as the models hand them over.
    fused = normal(N, C + HV * case.V + 2 * HV)
    rows = list(fused.split([C, HV * case.V, HV, HV], dim=1))
    layer: dict[str, Any] = {
        "conv_weight": normal(C, KERNEL_SIZE) * 0.5,
        "A_log": normal(HV).float(),
        "dt_bias": normal(HV).float(),
        "norm_weight": 1 + 0.1 * normal(case.V),
        "norm_eps": 1e-6,
        "recurrent_state": split_state(built.state),
        "conv_state": normal(case.R, C, KERNEL_SIZE - 1),
    }
    return rows, layer | kept | step_index(built, t)


def least_bytes(case: Case, t: int) -> int:
    """What one launch must move: rows, gates, gate z and output; windows; records read and written; states."""
    C = 2 * case.H * case.K + case.HV * case.V
    row = 2 * (C * (2 + min(t, KERNEL_SIZE - 1)) + 2 * case.HV + 2 * case.HV * case.V)
    delta = 2 if case.record_dtype == "bfloat16" else 4
    record = case.H * case.K * 2 + case.HV * case.V * delta + case.HV * 4
    return case.N * (row + record * (1 + t)) + case.R * case.HV * case.V * case.K * 4


def gate(step: Step, rows: list[Tensor], layer: dict[str, Any]) -> float:
    """Largest error of the output; raises when it, or a record, is off the reference's by more than the tests allow."""
    mine = {name: x.clone() if name.startswith("records") else x for name, x in layer.items()}
    wanted = {name: x.clone() if name.startswith("records") else x for name, x in layer.items()}
    o, expected = step(*rows, **mine), gated_delta_layer_step_ref(*rows, **wanted)
    torch.testing.assert_close(o, expected, **LIMIT)
    for name in ("records_g", "records_delta", "records_k", "records_x"):
        torch.testing.assert_close(mine[name], wanted[name], **LIMIT)
    return float((o.float() - expected.float()).abs().max())


def run(name: str, case: Case, t: int, args: argparse.Namespace, bandwidth: float) -> None:
    shape = {"R": case.R, "W": case.W, "H": case.H, "HV": case.HV, "K": case.K, "V": case.V, "t": t}
    shape |= {"record_dtype": case.record_dtype}
    least = least_bytes(case, t)
    sets = max(1, min(args.sets, -(-(256 << 20) // least)))
    problems = [problem(case, t, seed) for seed in range(sets)]
    error = gate(ARMS[name], *problems[0])
    if args.check_only:
        print(f"{name:10} {case.R:3} {case.W:4} t={t} error {error:.1e}", flush=True)
        return
    calls = [partial(ARMS[name], *rows, **layer) for rows, layer in problems]
    calls *= -(-MIN_LAUNCHES // sets)
    samples = [x / len(calls) for x in time_graph(calls, samples=args.samples, target_us=args.target_us)]
    value, floor = statistics.median(samples), least / bandwidth * 1e6
    append_result(
        "layer_step",
        arm=name,
        case=shape,
        metric="time",
        unit="us",
        value=value,
        spread=(min(samples), max(samples)),
        floor=floor,
        bandwidth=bandwidth,
        max_abs_error=error,
        out=args.out,
        commit=args.commit,
    )
    print(
        f"{name:10} R={case.R} W={case.W} t={t} {value:7.1f} us ({min(samples):.1f}..{max(samples):.1f})"
        f" floor {floor:6.1f} ratio {value / floor:5.2f} error {error:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["one_launch", "pair"], choices=list(ARMS))
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 16], metavar=("H", "HV"))
    parser.add_argument("--record-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sets", type=int, default=8, help="sets of inputs at most")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--target-us", type=float, default=2000, help="time of a sample at least")
    parser.add_argument("--check-only", action="store_true", help="check and compile, time nothing")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    bandwidth = copy_bandwidth()
    print(machine(), "commit", args.commit or commit(), f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for R, W, t, name in product(args.requests, args.widths, args.depths, args.arms):
        H, HV = args.heads
        case = Case(R=R, W=W, H=H, HV=HV, O=t + 2, record_dtype=args.record_dtype)
        try:
            run(name, case, t, args, bandwidth)
        except Exception as error:  # the other cases are still worth their time
            print(
                f"{name:10} R={R} W={W} t={t} FAILED: {type(error).__name__}: {str(error)[:400]}", flush=True
            )


if __name__ == "__main__":
    main()
