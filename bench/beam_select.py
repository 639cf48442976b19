"""Selection of one beam-search step: checked against the reference, then timed as CUDA graphs.

Logits of R requests of W beams over C codes, fp32 or bf16, all codes legal or a trie. A run goes over several
sets of logits, so that it does not find them in the L2 cache. The floor is reading the logits once at the
copy bandwidth measured in the same process.

    python bench/beam_select.py --prepare --torch
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import shlex
import statistics
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common import Failures, append_result, copy_bandwidth, time_graph
from onela.ops.beam_select.kernels import beam_select
from onela.ops.beam_select.reference import beam_select_ref


@dataclass(frozen=True)
class Case:
    """`children` is the mean number of legal codes of a beam; None: all codes, no trie."""

    R: int
    W: int
    C: int = 8192
    dtype: str = "float32"
    children: int | None = None
    normalizer: str = "level"

    @property
    def num_bytes(self) -> int:
        """What must be read: the logits, all or (normalised over the legal ones) those of the children."""
        codes = self.C if self.normalizer == "level" else self.children or self.C
        return self.R * self.W * codes * (4 if self.dtype == "float32" else 2)


CASES = (
    Case(4, 256),
    Case(16, 512),
    Case(1, 5000),
    Case(4, 256, dtype="bfloat16"),
    Case(16, 512, dtype="bfloat16"),
    Case(1, 5000, dtype="bfloat16"),
    Case(16, 512, C=16384),
    Case(16, 512, children=30),
    Case(16, 512, children=30, normalizer="allowed"),
    Case(4, 256, children=30, normalizer="allowed"),
    # A step of one request, free and over a trie of ten million random items on three levels: its second and its
    # third level, where a node has 1,144 children and one.
    Case(1, 256),
    Case(1, 256, children=1144),
    Case(1, 256, children=1),
    Case(4, 256, children=1144),
)

HIDDEN = 1024


def offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)


def make_inputs(case: Case, seed: int) -> tuple[Tensor, dict]:
    generator = torch.Generator("cuda").manual_seed(seed)
    N = case.R * case.W
    logits = torch.randn(N, case.C, generator=generator, device="cuda") * 3
    nodes = torch.zeros(N, dtype=torch.int32, device="cuda")
    child_offsets = child_codes = None
    if case.children is not None:
        counts = torch.randint(1, 2 * case.children, (N,), generator=generator, device="cuda")
        child_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        keys = torch.rand(N, case.C, generator=generator, device="cuda").argsort(1)
        legal = torch.arange(case.C, device="cuda")[None, :] < counts[:, None]
        child_codes = torch.where(legal, keys, case.C).sort(1).values[legal].to(torch.int32)
        nodes = torch.randperm(N, generator=generator, device="cuda").to(torch.int32)
    return logits.to(getattr(torch, case.dtype)), {
        "cum_logprobs": -5 * torch.rand(N, generator=generator, device="cuda"),
        "cu_rows": offsets([case.W] * case.R),
        "cu_out": offsets([case.W] * case.R),
        "trie_nodes": nodes,
        "child_offsets": child_offsets,
        "child_codes": child_codes,
        "normalizer": case.normalizer,
        "num_out": N,
    }


def check(case: Case) -> None:
    """Equal to the reference where scores have the same bits; close with the kernel's own normalizers."""
    logits, arguments = make_inputs(case, 0)
    given = arguments | {"normalizer": torch.logsumexp(logits.float(), -1)}
    for want, have in zip(beam_select_ref(logits, **given), beam_select(logits, **given)):
        assert torch.equal(want, have), case
    want, have = beam_select_ref(logits, **arguments)[2], beam_select(logits, **arguments)[2]
    width = (case.R, case.W)
    torch.testing.assert_close(
        have.view(width).sort(1).values, want.view(width).sort(1).values, rtol=1e-5, atol=1e-5
    )


def torch_topk(logits: Tensor, arguments: dict, case: Case) -> Tensor:
    """What one would write in torch: no order, no ties, no trie."""
    scores = torch.log_softmax(logits.float(), -1) + arguments["cum_logprobs"][:, None]
    return torch.topk(scores.view(case.R, -1), case.W, dim=1).indices


def measure(case: Case, bandwidth: float, with_torch: bool, out: Path | None, commit: str | None) -> None:
    """Check a case, then time it and append its lines of results."""
    check(case)
    sets = max(1, min(8, -(-(200 << 20) // case.num_bytes)))
    inputs = [make_inputs(case, seed) for seed in range(sets)]
    floor = case.num_bytes / bandwidth * 1e6 * (1 if case.normalizer == "level" else 0) or None
    arms = {"kernels": [partial(beam_select, logits, **arguments) for logits, arguments in inputs]}
    if with_torch and case.children is None:
        arms["torch"] = [partial(torch_topk, logits, arguments, case) for logits, arguments in inputs]
    for arm, calls in arms.items():
        report(arm, case, [t / sets for t in time_graph(calls)], floor, out, commit)


def report(
    arm: str, case: Case, times: list[float], floor: float | None, out: Path | None, commit: str | None
) -> None:
    value = statistics.median(times)
    append_result(
        "beam_select", arm=arm, case=asdict(case), metric="time", unit="us", value=value,
        spread=[min(times), max(times)], floor=floor, out=out, commit=commit,
    )  # fmt: skip
    ratio = "" if floor is None else f"{value / floor:6.2f} x floor"
    print(f"{arm:24s} {case}  {value:8.1f} us {ratio}", flush=True)


def measure_head(case: Case, out: Path | None, commit: str | None) -> None:
    """The level's head in fp32 and in bf16, and with the selection behind it, which may find logits in the cache."""
    logits, arguments = make_inputs(case, 0)
    hidden = torch.randn(case.R * case.W, HIDDEN, device="cuda").bfloat16() * 0.1
    weight = torch.randn(case.C, HIDDEN, device="cuda").bfloat16()

    def head() -> Tensor:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    arms = {
        "head": head,
        "head, bf16 logits": lambda: hidden @ weight.t(),
        "head and selection": lambda: beam_select(head(), **arguments),
        "selection, logits in L2": lambda: beam_select(logits, **arguments),
    }
    for arm, call in arms.items():
        report(arm, case, time_graph([call]), None, out, commit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, nargs="*", help="places in the list of cases")
    parser.add_argument("--torch", action="store_true", help="time torch's log_softmax and topk too")
    parser.add_argument(
        "--head", action="store_true", help="time the level's head, with the selection and without"
    )
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    parser.add_argument(
        "--prepare", action="store_true", help="first check all cases in parallel, which compiles them"
    )
    options = parser.parse_args()
    failures = Failures()
    if options.prepare:
        command = [sys.executable, __file__, "--check-only", "--cases"]
        numbers = options.cases or range(len(CASES))
        for child in [subprocess.Popen([*command, str(number)]) for number in numbers]:
            if child.wait(timeout=180):
                failures.add(shlex.join(map(str, child.args)), f"exit code {child.returncode}")
    if options.check_only:
        for number in options.cases or range(len(CASES)):
            check(CASES[number])
        return
    if options.head:
        for number in options.cases or (0, 1):
            measure_head(CASES[number], options.out, options.commit)
        return
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    for number in options.cases or range(len(CASES)):
        try:
            measure(CASES[number], bandwidth, options.torch, options.out, options.commit)
        except Exception as error:  # the other cases are still worth their time on the GPU
            failures.add(str(CASES[number]), repr(error))
    failures.exit()


if __name__ == "__main__":
    main()
