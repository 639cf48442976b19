"""The peers' own decode kernels on the operator's cases, where their packages are installed; absent ones are named.

Each peer is called through a public function, and its beams' states are reordered in the way that the function needs:
`copy` gathers the survivors' states into a second pool and updates them in place there, `read_parent` lets the kernel
read one row of a pool and write another. Every arm is first held against the reference. Times are of all decode calls
in one CUDA graph; the first call starts from states that already stand in the pool, one per beam.

No code of theirs is here. What is timed, by package and function:

    fla         fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule
    vllm        vllm.model_executor.layers.fla.ops.fused_recurrent_gated_delta_rule
    sglang      sglang.srt.layers.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
    flashinfer  flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose

    python bench/peers.py
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import importlib
import importlib.metadata
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import Failures, append_result, machine, time_graph
from bench.operator import Case, Problem, build, label, reference_outputs
from onela.ops.gated_delta.reference import gated_delta_gates

ERROR_LIMIT = {"float32": 5e-3, "bfloat16": 2e-2}
"""Of an output that is rounded to bf16, by the states' dtype."""


class NotTakenError(Exception):
    """A peer that does not take this case, or whose function is not where it was."""


@dataclass
class Inputs:
    """A problem whose gates come from raw ones, as some peers want them: `a` and `b` are [N, HV] bf16 per call."""

    problem: Problem
    a: list[Tensor]
    b: list[Tensor]
    A_log: Tensor
    dt_bias: Tensor
    dtype: torch.dtype
    """Of the states."""

    def rows(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        p = self.problem
        return p.q[t], p.k[t], p.v[t], p.g[t], p.beta[t]

    def states(self, *, pools: int, key_first: bool) -> Tensor:
        """`pools` times N states, [V, K] each or transposed; the first N hold every beam's prompt state."""
        case = self.problem.case
        state = self.problem.state.transpose(-1, -2) if key_first else self.problem.state
        states = torch.empty(pools * case.N, *state.shape[1:], dtype=self.dtype, device=state.device)
        states[: case.N].view(case.R, case.W, *state.shape[1:]).copy_(state[:, None])
        return states


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cuda") -> Inputs:
    problem = build(case, device=device)
    HV = case.HV
    A_log, dt_bias = torch.zeros(HV, device=device), torch.zeros(HV, device=device)
    a = [torch.randn(case.N, HV, device=device).sub_(1.5).bfloat16() for _ in range(problem.calls)]
    b = [torch.randn(case.N, HV, device=device).bfloat16() for _ in range(problem.calls)]
    for t in range(problem.calls):
        problem.g[t], problem.beta[t] = gated_delta_gates(a[t], b[t], A_log=A_log, dt_bias=dt_bias)
    return Inputs(problem, a, b, A_log, dt_bias, dtype)


Calls = list[Callable[[], Tensor]]
Peer = Callable[[Inputs, bool], Calls]
"""(inputs, key_first) -> one callable per decode call, which gives [N, HV, V]."""


def public(module: str, name: str) -> Any:
    """A function of an installed package. Raises ImportError without it, NotTakenError without the function."""
    importlib.import_module(module.split(".", 1)[0])
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotTakenError(f"{module}.{name}: {error}") from error


def in_turn(
    inputs: Inputs,
    states: Tensor,
    step: Callable[[int, Tensor], Tensor],
) -> Calls:
    """Calls that copy the survivors' states to the other half of `states` and hand that half to `step`."""
    p = inputs.problem
    halves = states.split(p.case.N)
    rows = [x.long() for x in p.parents]
    calls: Calls = []
    for t in range(p.calls):

        def call(t: int = t) -> Tensor:
            here = halves[t % 2]
            if t:
                torch.index_select(halves[1 - t % 2], 0, rows[t - 1], out=here)
            return step(t, here)

        calls.append(call)
    return calls


def fla_copy(inputs: Inputs, key_first: bool) -> Calls:
    """A new state comes out of every call; the survivors' are gathered from it before the next."""
    fused_recurrent = public("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    if inputs.dtype != torch.float32:
        raise NotTakenError("its states come out in fp32")
    p = inputs.problem
    kept = [inputs.states(pools=1, key_first=True)]
    rows = [x.long() for x in p.parents]
    calls: Calls = []
    for t in range(p.calls):

        def call(t: int = t) -> Tensor:
            q, k, v, g, beta = (x[:, None] for x in inputs.rows(t))
            before = kept[-1].index_select(0, rows[t - 1]) if t else kept[0]
            o, after = fused_recurrent(
                q, k, v, g=g, beta=beta, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True
            )  # fmt: skip
            del kept[1:]
            kept.append(after)
            return o[:, 0]

        calls.append(call)
    return calls


def vllm_copy(inputs: Inputs, key_first: bool) -> Calls:
    fused_recurrent = public("vllm.model_executor.layers.fla.ops", "fused_recurrent_gated_delta_rule")
    p = inputs.problem
    own = torch.arange(p.case.N, dtype=torch.int32, device=p.state.device)
    bounds = torch.arange(p.case.N + 1, dtype=torch.int64, device=p.state.device)

    def step(t: int, states: Tensor) -> Tensor:
        q, k, v, g, beta = (x[None] for x in inputs.rows(t))
        o, _ = fused_recurrent(
            q, k, v, g=g, beta=beta, initial_state=states, inplace_final_state=True, cu_seqlens=bounds,
            ssm_state_indices=own, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o[0]

    return in_turn(inputs, inputs.states(pools=2, key_first=key_first), step)


def vllm_read_parent(inputs: Inputs, key_first: bool) -> Calls:
    """As if a second draft token had been accepted: the kernel then reads the second index and writes the first."""
    fused_recurrent = public("vllm.model_executor.layers.fla.ops", "fused_recurrent_gated_delta_rule")
    p = inputs.problem
    N = p.case.N
    states = inputs.states(pools=2, key_first=key_first)
    own = torch.arange(N, dtype=torch.int32, device=p.state.device)
    bounds = torch.arange(N + 1, dtype=torch.int64, device=p.state.device)
    accepted = torch.full((N,), 2, dtype=torch.int32, device=p.state.device)
    calls: Calls = []
    for t in range(p.calls):
        # The first call reads the pool that holds the prompt's states, which is the first.
        read = (p.parents[t - 1] if t else own) + t % 2 * N
        indices = torch.stack([own + (1 - t % 2) * N, read], dim=1).contiguous()

        def call(t: int = t, indices: Tensor = indices) -> Tensor:
            q, k, v, g, beta = (x[None] for x in inputs.rows(t))
            o, _ = fused_recurrent(
                q, k, v, g=g, beta=beta, initial_state=states, inplace_final_state=True, cu_seqlens=bounds,
                ssm_state_indices=indices, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return o[0]

        calls.append(call)
    return calls


def sglang_copy(inputs: Inputs, key_first: bool) -> Calls:
    module = "sglang.srt.layers.attention.fla.fused_recurrent"
    packed_decode = public(module, "fused_recurrent_gated_delta_rule_packed_decode")
    p = inputs.problem
    N, HV, V = p.case.N, p.case.HV, p.case.V
    own = torch.arange(N, dtype=torch.int32, device=p.state.device)
    mixed = [torch.cat([x.flatten(1) for x in inputs.rows(t)[:3]], dim=1) for t in range(p.calls)]

    def step(t: int, states: Tensor) -> Tensor:
        o, _ = packed_decode(
            mixed_qkv=mixed[t], a=inputs.a[t], b=inputs.b[t], A_log=inputs.A_log, dt_bias=inputs.dt_bias,
            scale=p.case.K**-0.5, initial_state=states, out=mixed[t].new_empty(N, 1, HV, V), ssm_state_indices=own,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o[:, 0]

    return in_turn(inputs, inputs.states(pools=2, key_first=key_first), step)


def flashinfer_copy(inputs: Inputs, key_first: bool) -> Calls:
    decode = public("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")

    def step(t: int, states: Tensor) -> Tensor:
        q, k, v = (x[:, None] for x in inputs.rows(t)[:3])
        o, _ = decode(
            q, k, v, states, inputs.A_log, inputs.a[t][:, None], inputs.dt_bias, inputs.b[t][:, None],
            use_qk_l2norm=True,
        )  # fmt: skip
        return o[:, 0]

    return in_turn(inputs, inputs.states(pools=2, key_first=False), step)


def flashinfer_read_parent(inputs: Inputs, key_first: bool) -> Calls:
    """Reads and writes rows of one pool; documented for bf16 states of 128 x 128. Row 0 is the kernel's own."""
    decode = public("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    p = inputs.problem
    N = p.case.N
    if inputs.dtype != torch.bfloat16 or p.case.K != 128 or p.case.V != 128:
        raise NotTakenError("its pool is documented for bf16 states of 128 x 128")
    states = torch.cat(
        [p.state.new_zeros(1, *p.state.shape[1:]).bfloat16(), inputs.states(pools=2, key_first=False)]
    )
    own = torch.arange(N, dtype=torch.int32, device=p.state.device)
    calls: Calls = []
    for t in range(p.calls):
        read = 1 + (p.parents[t - 1] if t else own) + t % 2 * N
        write = 1 + own + (1 - t % 2) * N

        def call(t: int = t, read: Tensor = read, write: Tensor = write) -> Tensor:
            q, k, v = (x[:, None] for x in inputs.rows(t)[:3])
            o, _ = decode(
                q, k, v, None, inputs.A_log, inputs.a[t][:, None], inputs.dt_bias, inputs.b[t][:, None],
                use_qk_l2norm=True, initial_state=states, initial_state_indices=read, output_state_indices=write,
            )  # fmt: skip
            return o[:, 0]

        calls.append(call)
    return calls


PEERS: dict[str, Peer] = {
    "fla": fla_copy,
    "vllm": vllm_copy,
    "vllm_read_parent": vllm_read_parent,
    "sglang": sglang_copy,
    "flashinfer": flashinfer_copy,
    "flashinfer_read_parent": flashinfer_read_parent,
}
PACKAGES = {"fla": "fla-core", "flashinfer": "flashinfer-python"}
"""Distribution of an imported package, where the names differ."""


def version(name: str) -> str | None:
    package = name.split("_", 1)[0]
    try:
        return importlib.metadata.version(PACKAGES.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def largest_error(peer: Peer, case: Case, dtype: torch.dtype, key_first: bool, device: str = "cuda") -> float:
    inputs = make_inputs(case, dtype, device)
    expected = reference_outputs(inputs.problem)
    errors = [
        (call().float() - wanted).abs().max().item()
        for call, wanted in zip(peer(inputs, key_first), expected)
    ]
    return max(error if error == error else float("inf") for error in errors)


def run_peer(name: str, case: Case, dtype: torch.dtype, args: argparse.Namespace, failures: Failures) -> None:
    peer, state = PEERS[name], str(dtype).removeprefix("torch.")
    small = Case(R=2, W=32, H=case.H, HV=case.HV, K=case.K, V=case.V, O=4)
    try:
        # Versions differ in whether a state lies [V, K] or [K, V]; the check says which this one wants.
        errors = {key_first: largest_error(peer, small, dtype, key_first) for key_first in (True, False)}
        key_first = min(errors, key=lambda x: errors[x])
        error = errors[key_first]
        line = {
            "arm": name,
            "case": asdict(case) | {"state_dtype": state},
            "out": args.out,
            "commit": args.commit,
        }
        line["package_version"] = version(name)
        print(
            f"{name:24} {state:9} {label(case)} error {error:.1e}, states {'[K, V]' if key_first else '[V, K]'}"
        )
        append_result(
            "peers", **line, metric="max_abs_error", unit="1", value=error, limit=ERROR_LIMIT[state]
        )
        if not error <= ERROR_LIMIT[state]:
            failures.add(f"{name} {state} {label(case)}", f"wrong: error {error:.1e}; not timed")
            return
        samples = time_graph(peer(make_inputs(case, dtype), key_first), samples=args.samples)
        steps = case.O - 1
        value = statistics.median(samples) / steps
        spread = (min(samples) / steps, max(samples) / steps)
        append_result("peers", **line, metric="time_per_step", unit="us", value=value, spread=spread)
        print(f"{name:24} {state:9} {label(case)} {value:8.0f} us a step", flush=True)
    except NotTakenError as error:
        print(f"{name:24} {state:9} does not take it: {error}", flush=True)
    except ImportError:
        print(f"{name:24} absent", flush=True)
    except Exception as error:  # a peer that fails must not hide the others
        failures.add(f"{name} {state} {label(case)}", f"{type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--requests", type=int, nargs="+", default=[4])
    parser.add_argument("--widths", type=int, nargs="+", default=[256])
    parser.add_argument("--outputs", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=None, help="file of results; default bench/results/peers.jsonl"
    )
    parser.add_argument("--commit", default=None, help="commit to note, where there is no checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    print(machine(), flush=True)
    failures = Failures()
    for R, W, O in product(args.requests, args.widths, args.outputs):  # noqa: E741
        for name, dtype in product(args.peers, (torch.float32, torch.bfloat16)):
            run_peer(name, Case(R=R, W=W, O=O), dtype, args, failures)
    failures.exit()


if __name__ == "__main__":
    from bench.peers import main as run

    run()
