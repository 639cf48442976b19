"""The operator benchmark: all decode calls of one Gated DeltaNet layer, checked first, then timed as CUDA graphs.

A case is R requests of W beams with random parents, sorted within the request. One run is all its O - 1 decode calls,
one after the other, each on inputs of its own; small cases are repeated over several sets of inputs, so that a run
does not find its inputs in the L2 cache. `time_call_t` is the call that replays t records, repeated by itself. The
byte floor counts every gather, `delta` in the record dtype, over the copy bandwidth measured in the same process.
The sweep of 405 shapes is `bench/operator_sweep.py`.

    python bench/operator.py        # R=16 and R=4, W=512, O=3 and O=7, and the single calls
    python bench/operator.py --arms all --requests 4 --widths 256
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bench.common import append_result, commit, copy_bandwidth, machine, time_graph
from onela.ops.gated_delta.reference import replay_step_ref, split_state

OURS = ("replay", "replay_key_given", "replay_last_unwritten", "replay_triton")
ERROR_LIMIT = {"bfloat16": 4.88e-4, "float32": 2e-5}
BASELINE_ERROR_LIMIT = 4.88e-4
ROUNDED_STATE_ERROR_LIMIT = 2e-2
"""Of the arms that keep states in bf16, which are named so: they are timed, though they are not as exact."""


@dataclass(frozen=True)
class Case:
    R: int = 16
    W: int = 512
    H: int = 16
    HV: int = 16
    K: int = 128
    V: int = 128
    O: int = 3  # noqa: E741  (the field's name for output tokens)
    record_dtype: str = "bfloat16"

    @property
    def N(self) -> int:  # noqa: N802
        return self.R * self.W

    def call_bytes(self, t: int) -> int:
        """What the call that replays t records must move at least, every gather counted."""
        record = 2 if self.record_dtype == "bfloat16" else 4
        row = self.H * self.K * 2 + self.HV * self.V * record + self.HV * 4
        once = 2 * self.N * (self.H * self.K + self.HV * self.V) * 2 + self.R * self.HV * self.V * self.K * 4
        return once + (1 + t) * self.N * row


@dataclass
class Problem:
    """Inputs of every decode call of a case. `q[t]`, ... are the rows of call t; slots are contiguous per call."""

    case: Case
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    g: list[Tensor]
    beta: list[Tensor]
    state: Tensor
    parents: list[Tensor]
    ancestors: list[Tensor]
    slots: list[Tensor]
    cu_rows: Tensor
    prompts: Tensor
    depths: list[Tensor]
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return self.case.O - 1


def build(case: Case, seed: int = 0, device: str = "cuda") -> Problem:
    """Random inputs; gates and states of the size that trained layers have."""
    gen = torch.Generator(device).manual_seed(seed)
    calls, N = case.O - 1, case.N

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    bf16 = torch.bfloat16
    slots = [torch.arange(t * N, (t + 1) * N, dtype=torch.int32, device=device) for t in range(calls)]
    first = torch.arange(case.R, device=device)[:, None] * case.W
    parents, ancestors = [], [torch.empty(N, 0, dtype=torch.int32, device=device)]
    for t in range(1, calls):
        drawn = torch.randint(case.W, (case.R, case.W), generator=gen, device=device).sort(-1).values
        rows = (drawn + first).flatten()
        parents.append(rows.to(torch.int32))
        ancestors.append(torch.cat([ancestors[-1][rows], slots[t - 1][rows, None]], 1).contiguous())
    return Problem(
        case=case,
        q=[normal(N, case.H, case.K).to(bf16) for _ in range(calls)],
        k=[normal(N, case.H, case.K).to(bf16) for _ in range(calls)],
        v=[normal(N, case.HV, case.V).to(bf16) for _ in range(calls)],
        g=[-normal(N, case.HV).abs() * 0.3 for _ in range(calls)],
        beta=[normal(N, case.HV).sigmoid() for _ in range(calls)],
        state=normal(case.R, case.HV, case.V, case.K) * 0.1,
        parents=parents,
        ancestors=ancestors,
        slots=slots,
        cu_rows=torch.arange(case.R + 1, dtype=torch.int32, device=device) * case.W,
        prompts=torch.arange(case.R, dtype=torch.int32, device=device),
        depths=[torch.full((case.R,), t, dtype=torch.int32, device=device) for t in range(calls)],
    )


def records(problem: Problem, delta: torch.dtype, key: torch.dtype, gate: torch.dtype) -> dict[str, Tensor]:
    case, device = problem.case, problem.state.device
    num_slots = case.N * problem.calls
    return {
        "records_g": torch.empty(num_slots, case.HV, dtype=gate, device=device),
        "records_delta": torch.empty(num_slots, case.HV, case.V, dtype=delta, device=device),
        "records_k": torch.empty(num_slots, case.H, case.K, dtype=key, device=device),
    }


def step_index(problem: Problem, t: int) -> dict[str, Tensor]:
    return {
        "slots": problem.slots[t],
        "ancestors": problem.ancestors[t],
        "cu_rows": problem.cu_rows,
        "prompts": problem.prompts,
        "depths": problem.depths[t],
    }


def reference_outputs(problem: Problem) -> list[Tensor]:
    """Every call's output in fp64, from the same bf16 inputs and the fp32 state."""
    wide = torch.float64
    kept = records(problem, wide, wide, wide)
    state = problem.state.to(wide)
    outputs = []
    for t in range(problem.calls):
        rows = [x[t].to(wide) for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
        outputs.append(
            replay_step_ref(*rows, recurrent_state=state, **kept, **step_index(problem, t)).float()
        )
    return outputs


Calls = list[Callable[[], Tensor]]
Arm = Callable[[Problem, "torch.dtype | None"], Calls]
ARMS: dict[str, Arm] = {}
"""name -> (problem, out_dtype) -> one callable per decode call. An arm that cannot run raises ImportError."""


def arm(name: str) -> Callable[[Arm], Arm]:
    def register(function: Arm) -> Arm:
        ARMS[name] = function
        return function

    return register


def replay_calls(
    step: Callable[..., Tensor], problem: Problem, out_dtype: torch.dtype | None, raw: bool
) -> Calls:
    kept = records(problem, getattr(torch, problem.case.record_dtype), torch.bfloat16, torch.float32)
    state = split_state(problem.state)
    problem.extra["keys"] = kept["records_k"]
    calls: Calls = []
    for t in range(problem.calls):
        if raw:
            kept["records_k"][problem.slots[t].long()] = problem.k[t]
        rows = (problem.q[t], None if raw else problem.k[t], problem.v[t], problem.g[t], problem.beta[t])
        index = step_index(problem, t)

        def call(rows=rows, index=index) -> Tensor:
            return step(*rows, recurrent_state=state, **kept, **index, out_dtype=out_dtype)

        calls.append(call)
    return calls


@arm("replay")
def replay_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    """The op as the engine calls it; the key already lies in its record."""
    from onela.ops.gated_delta import replay_step

    return replay_calls(replay_step, problem, out_dtype, raw=True)


@arm("replay_key_given")
def replay_key_given_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    """The same with the key as an input, which the op copies into its record."""
    from onela.ops.gated_delta import replay_step

    return replay_calls(replay_step, problem, out_dtype, raw=False)


@arm("replay_last_unwritten")
def replay_last_unwritten_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    """The Hopper kernel, the last call leaving out the record that nobody will read."""
    from onela.ops.gated_delta.replay_hopper import launch_hopper

    last = problem.ancestors[-1]

    def step(*rows: Tensor, ancestors: Tensor, **keywords: Tensor) -> Tensor:
        return launch_hopper(*rows, ancestors=ancestors, **keywords, write_records=ancestors is not last)

    return replay_calls(step, problem, out_dtype, raw=True)


@arm("replay_triton")
def replay_triton_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    """The portable kernel."""
    from onela.ops.gated_delta.replay import replay_step_triton

    return replay_calls(replay_step_triton, problem, out_dtype, raw=True)


def error_limit(name: str, case: Case) -> float:
    """Largest error allowed. Outputs of small heads are larger, and their errors with them: both grow as 1 / K."""
    return _error_limit(name, case) * max(1, 128 / case.K)


def _error_limit(name: str, case: Case) -> float:
    if name in OURS or "_warps_" in name:
        return ERROR_LIMIT[case.record_dtype]
    return ROUNDED_STATE_ERROR_LIMIT if name.endswith("bf16") else BASELINE_ERROR_LIMIT


def gate(name: str, problem: Problem, expected: list[Tensor]) -> float:
    """Largest absolute error of any call's output, kept in fp32."""
    worst = 0.0
    for call, wanted in zip(ARMS[name](problem, torch.float32), expected):
        error = (call() - wanted).abs().max().item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


Job = tuple[str, Case, tuple[torch.dtype | None, ...]]
"""Arm, case, and the dtypes of its output: None is v's, as it is timed, and fp32 is what is checked."""

CHECKED, TIMED = torch.float32, None


def compile_call(job: Job) -> str:
    """Run the last call of a small case, so that its kernels are in Triton's cache; returns what went wrong."""
    name, case, out_dtypes = job
    load_arms()
    try:
        problem = build(case)
        for out_dtype in out_dtypes:
            ARMS[name](problem, out_dtype)[-1]()
        torch.cuda.synchronize()
    except ImportError:
        pass
    except Exception as error:  # an arm that fails is reported when its turn comes
        return f"{name} {label(case)}: {type(error).__name__}: {error}"
    return ""


def compile_all(jobs: list[Job], processes: int) -> None:
    """Compile several kernels at a time, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        for failure in pool.map(compile_call, jobs):
            if failure:
                print("could not compile", failure[:500], flush=True)


def compile_ahead(names: list[str], cases: list[Case], processes: int) -> None:
    """Compile every kernel that the cases need."""
    jobs = {
        (name, replace(case, R=2, W=64, O=o), (CHECKED, TIMED))
        for name in names
        for case in cases
        for o in range(2, case.O + 1)
    }
    compile_all(sorted(jobs, key=str), processes)


def load_arms() -> None:
    """Import the files that register further arms."""
    import bench.operator_baselines
    import bench.operator_cuts  # noqa: F401


def measure(
    name: str, case: Case, *, single_calls: bool, samples: int
) -> Iterator[tuple[str, list[float], int]]:
    """(metric, microseconds per sample, bytes at least) for all calls together, and for each call by itself."""
    per_set = sum(case.call_bytes(t) for t in range(case.O - 1))
    # The baselines' states alone are many times the L2 cache.
    sets = max(1, min(16, -(-(256 << 20) // per_set))) if name in OURS else 1
    calls = [ARMS[name](build(case, seed), None) for seed in range(sets)]
    repeats = max(1, 4 // sets) if name in OURS else 1
    order = [call for _ in range(repeats) for one in calls for call in one]
    times = time_graph(order, samples=samples)
    yield "time", [x / (sets * repeats) for x in times], per_set
    if single_calls:
        for t in range(case.O - 1):
            several = [one[t] for one in calls] * repeats
            times = time_graph(several, samples=samples)
            yield f"time_call_{t}", [x / len(several) for x in times], case.call_bytes(t)


def run_case(
    name: str,
    case: Case,
    args: argparse.Namespace,
    bandwidth: float,
    expected: list[Tensor] | None,
) -> None:
    try:
        if expected is not None:
            error = gate(name, build(case), expected)
            limit = error_limit(name, case)
            append_result(
                "operator",
                arm=name,
                case=asdict(case),
                metric="max_abs_error",
                unit="1",
                value=error,
                limit=limit,
                out=args.out,
                commit=args.commit,
            )
            if error > limit:
                print(
                    f"{name:24} {label(case)}  WRONG: error {error:.2e} over {limit:.2e}; not timed",
                    flush=True,
                )
                return
            print(f"{name:24} {label(case)}  error {error:.2e}", flush=True)
        for metric, samples, least in measure(
            name, case, single_calls=not args.all_calls_only, samples=args.samples
        ):
            value, floor = statistics.median(samples) / 1e3, least / bandwidth * 1e3
            append_result(
                "operator",
                arm=name,
                case=asdict(case),
                metric=metric,
                unit="ms",
                value=value,
                spread=(min(samples) / 1e3, max(samples) / 1e3),
                floor=floor,
                bandwidth=bandwidth,
                out=args.out,
                commit=args.commit,
            )
            spread = f"{min(samples):.1f}..{max(samples):.1f}"
            print(
                f"{name:24} {label(case)} {metric:12} {value * 1e3:8.1f} us ({spread}) floor {floor * 1e3:7.1f}"
                f" ratio {value / floor:5.2f}",
                flush=True,
            )
    except ImportError as error:
        print(f"{name:24} absent: {error}", flush=True)
    except Exception as error:  # the other cases are still worth their time
        print(f"{name:24} {label(case)} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()


def label(case: Case) -> str:
    return f"R={case.R} W={case.W} {case.H}/{case.HV}x{case.K}x{case.V} O={case.O} {case.record_dtype}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default="replay,replay_last_unwritten", help="comma-separated, or 'all'")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[512])
    parser.add_argument(
        "--outputs", type=int, nargs="+", default=[3, 7], help="output tokens O; O - 1 decode calls"
    )
    parser.add_argument(
        "--geometry", type=int, nargs=4, default=[16, 16, 128, 128], metavar=("H", "HV", "K", "V")
    )
    parser.add_argument("--record-dtype", default="bfloat16", choices=sorted(ERROR_LIMIT))
    parser.add_argument("--processes", type=int, default=12, help="processes that compile ahead; 0: none")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--all-calls-only", action="store_true", help="do not time the single calls")
    parser.add_argument("--compile-only", action="store_true", help="stop when every kernel is compiled")
    parser.add_argument(
        "--no-gate", action="store_true", help="skip the fp64 check (for repeated tuning runs only)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="file of results; default bench/results/operator.jsonl"
    )
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    load_arms()
    args = parser.parse_args()
    names = [x for x in ARMS if "_warps_" not in x] if args.arms == "all" else args.arms.split(",")
    for name in names:
        if name not in ARMS:
            parser.error(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    bandwidth = copy_bandwidth()
    print(machine(), "commit", args.commit or commit(), f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    cases = [
        Case(R, W, *args.geometry, O=O, record_dtype=args.record_dtype)
        for O, W, R in product(args.outputs, args.widths, args.requests)  # noqa: E741
    ]
    if args.processes:
        compile_ahead(names, cases, args.processes)
    if args.compile_only:
        return
    for case in cases:
        expected = None if args.no_gate else reference_outputs(build(case))
        for name in names:
            run_case(name, case, args, bandwidth, expected)


if __name__ == "__main__":
    # Run as the module that the arms' files import, so that there is one registry.
    from bench.operator import main as run

    run()
