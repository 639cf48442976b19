"""The peers' own decode kernels on the operator's cases, where their packages are installed; absent ones are named.

Each peer is called through a public function, and its beams' states are reordered in the way that the function needs:
`copy` gathers the survivors' states into a second pool and updates them in place there, `read_parent` lets the kernel
read one row of a pool and write another, `replay_ssm` keeps one checkpoint per beam, or per request where it is
`shared`, and copies the survivors' records. Every arm is first held against the reference. Times are of all decode
calls in one CUDA graph; its first call finds the prompt's state in the pool, where states are copied one per beam.

No code of theirs is here. What is timed, by arm and function, in the first of the modules that has it:

    fla                     fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule
    vllm                    FLA_IN_VLLM.fused_recurrent_gated_delta_rule_packed_decode
    vllm_read_parent        FLA_IN_VLLM.fused_recurrent_gated_delta_rule
    sglang                  FLA_IN_SGLANG.fused_recurrent_gated_delta_rule_packed_decode
    sglang_read_parent      FLA_IN_SGLANG.fused_recurrent_gated_delta_rule_update
    sglang_replay_ssm, sglang_replay_ssm_shared
                            SPEC_DECODE_IN_SGLANG.gdn_replayssm_spec_decode
    flashinfer, flashinfer_read_parent
                            flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose

Where a kernel takes fewer rows than a case has, because its grid ends at 65,535 programs, it is called in parts.

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
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import Failures, append_result, machine, time_graph
from bench.operator import Case, Problem, build, label, reference_outputs
from onela.ops.gated_delta.reference import gated_delta_gates

ERROR_LIMIT = {"float32": 5e-3, "bfloat16": 2e-2}
"""Of an output that is rounded to bf16, by the states' dtype."""


FLA_IN_VLLM = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops")
FLA_IN_SGLANG = (
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "sglang.srt.layers.attention.fla.fused_recurrent",
)
"""Newest version first."""
SPEC_DECODE_IN_SGLANG = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode"

MAX_GRID = 65_535
"""Programs in the second and third dimension of a CUDA grid."""


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
        """[1 + `pools` * N + R] states, [V, K] each or transposed. Row 0 stays free, as vLLM and FlashInfer want it;
        the next N hold every beam's prompt state, the last R the prompts'."""
        case = self.problem.case
        state = self.problem.state.transpose(-1, -2) if key_first else self.problem.state
        rows = 1 + pools * case.N + case.R
        states = torch.empty(rows, *state.shape[1:], dtype=self.dtype, device=state.device)
        states[0].zero_()
        states[1 : 1 + case.N].view(case.R, case.W, *state.shape[1:]).copy_(state[:, None])
        states[-case.R :] = state
        return states

    def requests(self) -> Tensor:
        """[N] int32: the request of every row."""
        case = self.problem.case
        return torch.arange(case.N, dtype=torch.int32, device=self.problem.state.device) // case.W

    def read_rows(self, t: int) -> Tensor:
        """[N] int32: the rows of two pools that hold what call t starts from: the prompts', then the beams' parents."""
        N = self.problem.case.N
        if not t:
            return 1 + 2 * N + self.requests()
        return 1 + self.problem.parents[t - 1] + t % 2 * N

    def write_rows(self, t: int) -> Tensor:
        """[N] int32: the rows of the other pool."""
        p = self.problem
        own = torch.arange(p.case.N, dtype=torch.int32, device=p.state.device)
        return 1 + own + (1 - t % 2) * p.case.N

    def parts(self) -> list[slice]:
        """The rows, in as few parts as a kernel needs whose grid has one program for each row and value head."""
        N = self.problem.case.N
        count = -(-N * self.problem.case.HV // MAX_GRID)
        bounds = [N * i // count for i in range(count + 1)]
        return [slice(first, last) for first, last in pairwise(bounds)]


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cuda") -> Inputs:
    problem = build(case, device=device)
    HV = case.HV
    A_log, dt_bias = torch.zeros(HV, device=device), torch.zeros(HV, device=device)
    a = [torch.randn(case.N, HV, device=device).sub_(1.5).bfloat16() for _ in range(problem.calls)]
    b = [torch.randn(case.N, HV, device=device).bfloat16() for _ in range(problem.calls)]
    for t in range(problem.calls):
        problem.g[t], problem.beta[t] = gated_delta_gates(a[t], b[t], A_log=A_log, dt_bias=dt_bias)
    return Inputs(problem, a, b, A_log, dt_bias, dtype)


Calls = list[Callable[[], "Tensor | list[Tensor]"]]
Peer = Callable[[Inputs, bool], Calls]
"""(inputs, key_first) -> one callable per decode call, which gives [N, HV, V], whole or in parts of the rows."""


def public(modules: str | tuple[str, ...], name: str) -> Any:
    """A function of an installed package, from the first of the modules that has it. Raises ImportError where the
    package is not installed, NotTakenError where it is but cannot give the function."""
    modules = (modules,) if isinstance(modules, str) else modules
    package = modules[0].split(".", 1)[0]
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # a package that lacks one of its own needs fails in ways of its own
            reasons.append(f"{module}.{name}: {type(error).__name__}: {error}")
    raise NotTakenError("; ".join(reasons))


def in_turn(
    inputs: Inputs,
    states: Tensor,
    step: Callable[[int, Tensor, Tensor], Tensor | list[Tensor]],
) -> Calls:
    """Calls that copy the survivors' states to the other half of `states` and hand that half's states and rows
    ([N] int32) to `step`."""
    p = inputs.problem
    halves = states[1 : 1 + 2 * p.case.N].split(p.case.N)
    parents = [x.long() for x in p.parents]
    own = torch.arange(p.case.N, dtype=torch.int32, device=states.device)
    rows = [1 + own, 1 + p.case.N + own]
    calls: Calls = []
    for t in range(p.calls):

        def call(t: int = t) -> Tensor | list[Tensor]:
            here = halves[t % 2]
            if t:
                torch.index_select(halves[1 - t % 2], 0, parents[t - 1], out=here)
            return step(t, here, rows[t % 2])

        calls.append(call)
    return calls


def fla_copy(inputs: Inputs, key_first: bool) -> Calls:
    """A new state comes out of every call; the survivors' are gathered from it before the next."""
    fused_recurrent = public("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    if inputs.dtype != torch.float32:
        raise NotTakenError("its states come out in fp32")
    p = inputs.problem
    kept = [inputs.states(pools=1, key_first=True)[1 : 1 + p.case.N]]
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


def packed_copy(
    packed_decode: Callable[..., Any], inputs: Inputs, key_first: bool, parts: list[slice]
) -> Calls:
    """vLLM's kernel for decode, which SGLang took over: q, k and v in one tensor, gates computed inside."""
    p = inputs.problem
    mixed = [torch.cat([x.flatten(1) for x in inputs.rows(t)[:3]], dim=1) for t in range(p.calls)]
    states = inputs.states(pools=2, key_first=key_first)

    def step(t: int, here: Tensor, rows: Tensor) -> Tensor:
        out = mixed[t].new_empty(p.case.N, 1, p.case.HV, p.case.V)
        for part in parts:
            packed_decode(
                mixed_qkv=mixed[t][part], a=inputs.a[t][part], b=inputs.b[t][part], A_log=inputs.A_log,
                dt_bias=inputs.dt_bias, scale=p.case.K**-0.5, initial_state=states, out=out[part],
                ssm_state_indices=rows[part], use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        return out[:, 0]

    return in_turn(inputs, states, step)


def vllm_copy(inputs: Inputs, key_first: bool) -> Calls:
    packed_decode = public(FLA_IN_VLLM, "fused_recurrent_gated_delta_rule_packed_decode")
    # Past the limit it takes a grid of three dimensions.
    return packed_copy(packed_decode, inputs, key_first, [slice(0, inputs.problem.case.N)])


def vllm_read_parent(inputs: Inputs, key_first: bool) -> Calls:
    """As if a second draft token had been accepted: the kernel then reads the second index and writes the first."""
    fused_recurrent = public(FLA_IN_VLLM, "fused_recurrent_gated_delta_rule")
    p = inputs.problem
    states = inputs.states(pools=2, key_first=key_first)
    parts = inputs.parts()
    bounds = [
        torch.arange(part.stop - part.start + 1, dtype=torch.int64, device=p.state.device) for part in parts
    ]
    accepted = torch.full((p.case.N,), 2, dtype=torch.int32, device=p.state.device)
    calls: Calls = []
    for t in range(p.calls):
        indices = torch.stack([inputs.write_rows(t), inputs.read_rows(t)], dim=1).contiguous()

        def call(t: int = t, indices: Tensor = indices) -> list[Tensor]:
            outputs = []
            for part, cu_seqlens in zip(parts, bounds):
                q, k, v, g, beta = (x[part][None] for x in inputs.rows(t))
                o, _ = fused_recurrent(
                    q, k, v, g=g, beta=beta, initial_state=states, inplace_final_state=True, cu_seqlens=cu_seqlens,
                    ssm_state_indices=indices[part], num_accepted_tokens=accepted[part],
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                outputs.append(o[0])
            return outputs

        calls.append(call)
    return calls


def sglang_copy(inputs: Inputs, key_first: bool) -> Calls:
    packed_decode = public(FLA_IN_SGLANG, "fused_recurrent_gated_delta_rule_packed_decode")
    return packed_copy(packed_decode, inputs, key_first, inputs.parts())


def sglang_read_parent(inputs: Inputs, key_first: bool) -> Calls:
    """As in the verification of drafts: states are read from one pool, and every token's is written to another."""
    update = public(FLA_IN_SGLANG, "fused_recurrent_gated_delta_rule_update")
    p = inputs.problem
    states = inputs.states(pools=2, key_first=key_first)
    prompts, requests = states[-p.case.R :], inputs.requests()
    halves = states[1 : 1 + 2 * p.case.N].split(p.case.N)
    own = torch.arange(p.case.N, dtype=torch.int32, device=p.state.device)
    parts = inputs.parts()
    calls: Calls = []
    for t in range(p.calls):

        def call(t: int = t) -> list[Tensor]:
            outputs = []
            for part in parts:
                q, k, v, g, beta = (x[part][:, None] for x in inputs.rows(t))
                o = update(
                    q, k, v, g=g, beta=beta, initial_state_source=halves[t % 2] if t else prompts,
                    initial_state_indices=(p.parents[t - 1] if t else requests)[part],
                    use_qk_l2norm_in_kernel=True, disable_state_update=True,
                    intermediate_states_buffer=halves[1 - t % 2][:, None], intermediate_state_indices=own[part],
                    cache_steps=1,
                )  # fmt: skip
                outputs.append(o[:, 0])
            return outputs

        calls.append(call)
    return calls


def sglang_replay(inputs: Inputs, shared: bool) -> Calls:
    """The verification of a single drafted token, which replays a row's records on its checkpoint and adds one to them;
    nothing is folded, as a ring holds all of a run. The cursors stand still in tensors of their own."""
    spec_decode = public(SPEC_DECODE_IN_SGLANG, "gdn_replayssm_spec_decode")
    p = inputs.problem
    case, device = p.case, p.state.device
    N, H, HV, K, V = case.N, case.H, case.HV, case.K, case.V
    ring = 1 << (p.calls - 1).bit_length()
    int32 = {"dtype": torch.int32, "device": device}
    if shared:
        checkpoints = torch.cat([p.state.new_zeros(1, *p.state.shape[1:]), p.state]).to(inputs.dtype)
        rows = 1 + inputs.requests()
    else:
        checkpoints, rows = inputs.states(pools=1, key_first=False), 1 + torch.arange(N, **int32)
    own, bounds = torch.arange(N, **int32), torch.arange(N + 1, **int32)
    base, no_flush = torch.zeros(N, **int32), torch.zeros(N, dtype=torch.int8, device=device)
    parents = [x.long() for x in p.parents]
    halves = [
        {
            "d_cache": torch.empty(N, HV, ring, V, dtype=torch.bfloat16, device=device),
            "k_cache": torch.empty(N, H, ring, K, dtype=torch.bfloat16, device=device),
            "g_cache": torch.empty(N, HV, ring, device=device),
        }
        for _ in range(2)
    ]
    calls: Calls = []
    for t in range(p.calls):
        written = torch.full((N,), t, **int32)

        def call(t: int = t, written: Tensor = written) -> Tensor:
            here, before = halves[t % 2], halves[1 - t % 2]
            for name in here if t else ():
                if 2 * t >= ring:
                    torch.index_select(before[name], 0, parents[t - 1], out=here[name])
                else:  # fewer bytes, though they move twice
                    here[name][:, :, :t] = before[name][:, :, :t].index_select(0, parents[t - 1])
            q, k, v = inputs.rows(t)[:3]
            return spec_decode(
                q, k, v, inputs.a[t], inputs.b[t], inputs.A_log, inputs.dt_bias, checkpoint_state=checkpoints, **here,
                rawv_cache=None, rawk_cache=None, beta_cache=None, out=torch.empty_like(v), query_start_loc=bounds,
                ssm_state_indices=rows, replay_indices=own, write_pos=written, cache_base=base, is_flush=no_flush,
                max_cache_len=ring, max_spec_len=1, launch_mode="verify",
            )  # fmt: skip

        calls.append(call)
    return calls


def flashinfer_copy(inputs: Inputs, key_first: bool) -> Calls:
    decode = public("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")

    def step(t: int, here: Tensor, rows: Tensor) -> Tensor:
        q, k, v = (x[:, None] for x in inputs.rows(t)[:3])
        o, _ = decode(
            q, k, v, here, inputs.A_log, inputs.a[t][:, None], inputs.dt_bias, inputs.b[t][:, None],
            use_qk_l2norm=True,
        )  # fmt: skip
        return o[:, 0]

    return in_turn(inputs, inputs.states(pools=2, key_first=False), step)


def flashinfer_read_parent(inputs: Inputs, key_first: bool) -> Calls:
    """Reads and writes rows of one pool; documented for states of 128 x 128. Row 0 is the kernel's own."""
    decode = public("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    p = inputs.problem
    if p.case.K != 128 or p.case.V != 128:
        raise NotTakenError("its pool is documented for states of 128 x 128")
    states = inputs.states(pools=2, key_first=False)
    calls: Calls = []
    for t in range(p.calls):
        read, write = inputs.read_rows(t), inputs.write_rows(t)

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
    "sglang_read_parent": sglang_read_parent,
    "sglang_replay_ssm": lambda inputs, key_first: sglang_replay(inputs, shared=False),
    "sglang_replay_ssm_shared": lambda inputs, key_first: sglang_replay(inputs, shared=True),
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
    errors = []
    for call, wanted in zip(peer(inputs, key_first), expected):
        output = call()
        output = torch.cat(output) if isinstance(output, list) else output
        errors.append((output.float() - wanted).abs().max().item())
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
