"""Attention of one decode step, and of new prompts: checked against the reference, then timed as CUDA graphs.

R requests of W beams, each over its own prompt and `t` random ancestors (sorted parents) and its own new key;
bf16, pages in random order. The floor is the matrix work, prompt and own keys once per beam, at the bf16 rate
of a large matrix product measured in the same process. `torch` is torch's fused attention with the beams as
queries: contiguous prompt keys, no own keys, no records.

With --prompts: causal attention of B prompts of L tokens, by our own kernel, by cuDNN over the rectangle and by torch's
packed attention ("flash"). The floor is half of the square of each prompt's products at the same rate.

    python bench/attention.py --prepare
    python bench/attention.py --prompts
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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import Failures, append_result, time_events, time_graph
from onela.ops.attention import prefill
from onela.ops.attention.decode import beam_attention_triton
from onela.ops.attention.decode_hopper import beam_attention_hopper
from onela.ops.attention.prefill_hopper import prompt_attention_hopper
from onela.ops.attention.reference import beam_attention_ref
from onela.ops.prefill_tables import NewTokens, PrefillShape, PrefillTables, TableLayout


@dataclass(frozen=True)
class Case:
    R: int
    W: int
    prompt: int
    t: int = 1
    HQ: int = 8
    HKV: int = 2
    D: int = 256
    page_size: int = 64

    @property
    def flop(self) -> int:
        return 4 * self.R * self.W * self.HQ * self.D * (self.prompt + self.t + 1)


CASES = (
    Case(4, 256, 1024),
    Case(4, 256, 5120),
    Case(1, 256, 5120),
    Case(16, 512, 1024),
    Case(4, 256, 1024, t=5),
    Case(16, 512, 1024, t=5),
    Case(16, 512, 1024, t=0),
    Case(16, 512, 1024, page_size=128),
    Case(4, 256, 1024, HQ=16, HKV=8, D=128),
    Case(1, 256, 5000, HQ=16, HKV=8, D=128),
    Case(1, 5000, 2500, HQ=16, HKV=8, D=128),
    Case(1, 5000, 5000, HQ=16, HKV=8, D=128),
)


@dataclass(frozen=True)
class PromptCase:
    B: int
    L: int
    HQ: int = 16
    HKV: int = 8
    D: int = 128

    @property
    def flop(self) -> int:
        return 4 * self.B * self.L * (self.L + 1) // 2 * self.HQ * self.D


PROMPT_CASES = (
    PromptCase(1, 5000),
    PromptCase(1, 1000),
    PromptCase(1, 2500),
    PromptCase(1, 10000),
    PromptCase(4, 5000),
    PromptCase(1, 5000, HQ=8, HKV=2, D=256),
    PromptCase(4, 5120, HQ=8, HKV=2, D=256),
    PromptCase(1, 5000, D=64),
    PromptCase(1, 1000, D=64),
    PromptCase(4, 5000, D=64),
)


def make_inputs(case: Case, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    N, heads = case.R * case.W, (case.HKV, case.D)
    pages = -(-case.prompt // case.page_size)
    order = torch.randperm(case.R * pages, generator=generator, device="cuda")
    ancestors = torch.full((N, max(1, case.t)), -1, dtype=torch.int32, device="cuda")
    first = torch.arange(case.R, device="cuda")[:, None] * case.W
    parents = torch.arange(case.W, device="cuda").expand(case.R, -1)
    for j in range(case.t - 1, -1, -1):
        pick = torch.randint(0, case.W, (case.R, case.W), generator=generator, device="cuda").sort(1).values
        parents = pick.gather(1, parents)
        ancestors[:, j] = (j * N + first + parents).flatten().to(torch.int32)
    return (normal(N, case.HQ, case.D), normal(N, *heads), normal(N, *heads)), {
        "k_cache": normal(case.R * pages, case.page_size, *heads),
        "v_cache": normal(case.R * pages, case.page_size, *heads),
        "page_table": order.reshape(case.R, pages).to(torch.int32),
        "prompt_lens": torch.full((case.R,), case.prompt, dtype=torch.int32, device="cuda"),
        "records_k": normal((case.t + 1) * N, *heads),
        "records_v": normal((case.t + 1) * N, *heads),
        "slots": case.t * N + torch.arange(N, dtype=torch.int32, device="cuda"),
        "ancestors": ancestors,
        "cu_rows": torch.arange(0, N + 1, case.W, dtype=torch.int32, device="cuda"),
        "prompts": torch.arange(case.R, dtype=torch.int32, device="cuda"),
        "depths": torch.full((case.R,), case.t, dtype=torch.int32, device="cuda"),
    }


def check(run: Callable, case: Case) -> float:
    """Largest error over the largest output, against fp32 arithmetic on the same values; records too."""
    qkv, arguments = make_inputs(case)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
    want = beam_attention_ref(*(x.float() for x in qkv), **wide)
    have = run(*qkv, **arguments)
    error = float((have.float() - want).abs().max() / want.abs().max())
    assert error < 2**-7, (case, error)
    for name in ("records_k", "records_v"):
        assert torch.equal(arguments[name].float(), wide[name]), (case, name)
    return error


def torch_fused(case: Case) -> Callable[[], torch.Tensor]:
    G = case.HQ // case.HKV
    q = torch.randn(case.R, case.HKV, case.W * G, case.D, device="cuda").bfloat16()
    k, v = (torch.randn(case.R, case.HKV, case.prompt, case.D, device="cuda").bfloat16() for _ in range(2))
    return partial(F.scaled_dot_product_attention, q, k, v)


def matrix_rate() -> float:
    """FLOP per second of a large bf16 matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / (statistics.median(time_events(lambda: a @ b, samples=10)) * 1e-6)


def make_prompts(case: PromptCase) -> tuple[list[torch.Tensor], PrefillTables]:
    """Queries, keys and values [B * L, heads, D], and the tables of a rectangle."""
    layout = TableLayout(PrefillShape(case.B * case.L, case.B, case.L, rectangle=True), 64)
    prompts = [NewTokens(np.zeros(case.L, np.int32), 0, i, []) for i in range(case.B)]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = [
        torch.randn(case.B * case.L, heads, case.D, generator=generator, device="cuda").bfloat16()
        for heads in (case.HQ, case.HKV, case.HKV)
    ]
    return rows, layout.tables(layout.host(prompts).cuda())


def prompt_calls(
    case: PromptCase, rows: list[torch.Tensor], tables: PrefillTables
) -> dict[str, Callable[[], torch.Tensor]]:
    scale = case.D**-0.5
    return {
        "hopper": partial(prompt_attention_hopper, *rows, tables, scale),
        "cudnn": partial(prefill.dense_attention, *rows, case.B, scale),
        "flash": partial(prefill.flash_attention, *rows, tables.cu_seqlens, case.L, scale),
    }


def check_prompts(o: torch.Tensor, rows: list[torch.Tensor], case: PromptCase) -> float:
    """Largest error over the largest output against fp32 arithmetic, of the first and the last prompt's first head."""
    error = 0.0
    for b in (0, case.B - 1):
        of = slice(b * case.L, (b + 1) * case.L)
        q, k, v = (x[of, 0].float() for x in rows)
        ahead = torch.ones(case.L, case.L, dtype=torch.bool, device="cuda").triu(1)
        want = (q @ k.T * case.D**-0.5).masked_fill_(ahead, float("-inf")).softmax(-1) @ v
        error = max(error, float((o[of, 0].float() - want).abs().max() / want.abs().max()))
    assert error < 2**-7, (case, error)
    return error


def measure_prompts(case: PromptCase, rate: float, out: Path | None, commit: str | None) -> None:
    """Check and time every arm of a case in turns, and append their lines; `hot`: after a quarter of a second."""
    rows, tables = make_prompts(case)
    calls = prompt_calls(case, rows, tables)
    floor = case.flop / rate * 1e6
    errors = {arm: check_prompts(call(), rows, case) for arm, call in calls.items()}
    for arm, call in calls.items():
        for metric, target in (("prompt", 1000), ("prompt_hot", 250000)):
            time.sleep(0.1)
            times = time_graph([call] * 4, samples=1 if metric == "prompt_hot" else 3, target_us=target)
            times = [one / 4 for one in times]
            value = statistics.median(times)
            rate_here = case.flop / value / 1e6
            append_result(
                "attention", arm=arm, case=asdict(case), metric=metric, unit="us", value=value,
                spread=[min(times), max(times)], floor=floor, out=out, error=errors[arm], tflops=rate_here,
                commit=commit,
            )  # fmt: skip
            print(
                f"{arm:8s} {metric:10s} {case} {value:8.1f} us {rate_here:5.0f} TFLOP/s {value / floor:5.2f} x floor "
                f"error {errors[arm]:.1e}",
                flush=True,
            )


RUNS = {"hopper": beam_attention_hopper, "triton": beam_attention_triton}


def measure(case: Case, arm: str, splits: int, rate: float, out: Path | None, commit: str | None) -> None:
    """Check a case, then time it and append its line of results; `splits` 0 lets the wrapper choose."""
    floor = case.flop / rate * 1e6
    error = None
    if arm == "torch":
        call: Callable = torch_fused(case)
    else:
        run = partial(RUNS[arm], splits=splits or None)
        error = check(run, case)
        qkv, arguments = make_inputs(case)
        call = partial(run, *qkv, **arguments)
    times = time_graph([call])
    value = statistics.median(times)
    label = arm if not splits else f"{arm}_splits_{splits}"
    append_result(
        "attention", arm=label, case=asdict(case), metric="time", unit="us", value=value,
        spread=[min(times), max(times)], floor=floor, out=out, error=error,
        commit=commit,
    )  # fmt: skip
    print(f"{label:16s} {case}  {value:7.1f} us  {value / floor:5.2f} x floor  error {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, nargs="*", help="places in the list of cases")
    parser.add_argument("--arms", nargs="*", default=["hopper", "triton", "torch"])
    parser.add_argument(
        "--splits", type=int, nargs="*", default=[0], help="pieces of the prompt to try; 0: chosen"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="*", help="new prompts instead: places in their list of cases, or all"
    )
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    parser.add_argument(
        "--prepare", action="store_true", help="first check all cases in parallel, which compiles them"
    )
    options = parser.parse_args()
    failures = Failures()
    if options.prompts is not None:
        rate = matrix_rate()
        print(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
        for number in options.prompts or range(len(PROMPT_CASES)):
            try:
                measure_prompts(PROMPT_CASES[number], rate, options.out, options.commit)
            except Exception as error:  # the other cases are still worth their time on the GPU
                failures.add(str(PROMPT_CASES[number]), repr(error))
        failures.exit()
        return
    if options.prepare:
        command = [sys.executable, __file__, "--check-only", "--cases"]
        numbers = options.cases or range(len(CASES))
        for child in [subprocess.Popen([*command, str(number)]) for number in numbers]:
            if child.wait(timeout=180):
                failures.add(shlex.join(map(str, child.args)), f"exit code {child.returncode}")
    if options.check_only:
        for number in options.cases or range(len(CASES)):
            for run in RUNS.values():
                check(run, CASES[number])
        return
    rate = matrix_rate()
    print(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    for number in options.cases or range(len(CASES)):
        for arm in options.arms:
            for splits in options.splits if arm != "torch" else [0]:
                try:
                    measure(CASES[number], arm, splits, rate, options.out, options.commit)
                except Exception as error:  # the other cases are still worth their time on the GPU
                    failures.add(f"{arm} {CASES[number]}", repr(error))
    failures.exit()


if __name__ == "__main__":
    main()
