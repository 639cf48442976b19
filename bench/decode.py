"""The decode forward of a whole model, every arm on one pipeline: one option of the engine is changed, nothing else.

The model has Qwen3.5-0.8B's shape (18 Gated DeltaNet and 6 softmax layers) and random weights; the prompts' states are
random too, and the same for every arm. For every arm the requests are answered once, and their items are held against
the first arm's; then every decode step is timed as the replay of its CUDA graph, and the matrix products of a step
alone, on as many rows, in the same run. A step does not depend on how many follow it, so the time for SIDs of O tokens
is the sum of the first O - 1 steps of the longest. An arm whose pools and workspace do not fit into the GPU's memory by
the formula of `onela capacity` is not tried. `--parts` adds what the kernels of all steps of the first shape are for
(head and selection with the first arm, as they do not depend on it). `--gate-only` answers real prompts with a fp32
model of the same shape: there every arm must return the same items.

    python bench/decode.py [--prompts 1024 5120] [--tokens 3 7] [--arms replay full_state_copy ...]
    python bench/decode.py --shapes 4x256 1x512 16x128:1024 --tokens 3 4 5 6 7
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import Failures, append_result, machine, time_events, time_graph
from onela import BeamParams, Engine, Request, Result, SidVocabulary
from onela.bench.decode import StepTimes, choose, measure_steps, part_times, run_steps, start
from onela.bench.models import (
    SHAPE_08B,
    TINY,
    engine_of,
    matrix_products,
    overlap,
    random_model,
    vocabulary_of,
)
from onela.bench.suite import read_shape
from onela.cli.capacity import possible_widths
from onela.config import CHOICES
from onela.engine.verify import VARIANTS
from onela.errors import ConfigError
from onela.models import CausalLM
from onela.models.footprint import module_bytes, row_bytes
from onela.state.capacity import RequestSize, ServedModel, max_requests

MIN_OVERLAP = 0.7
"""Least share of items that an arm must have in common with the first. In bf16 every layer rounds, and each arm rounds
other numbers, so beams near the border change places; in fp32 the arms agree (`--gate-only`)."""


def print_kernels(run: Callable[[], Any], count: int = 16, title: str = "the last step") -> None:
    """The kernels of a run by their time, as torch's profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"  kernels of {title}, {total:.0f} us in all:")
    for event in events[:count]:
        print(f"  {event.self_device_time_total:8.0f} us {event.count:5d} x  {event.key[:90]}", flush=True)


def time_steps(
    engine: Engine, requests: Sequence[Request], params: BeamParams, *, profile: bool = False
) -> list[list[float]]:
    """Microseconds of each decode forward, samples per step; without graphs one sample, by the host's clock."""
    runner = engine.runner
    active = [engine.prepare(request, params) for request in requests]
    times: list[list[float]] = []
    with torch.inference_mode():
        for request in active:
            engine.scheduler.add(request)
        while any(request.outcome is None for request in active):
            batch = engine.scheduler.schedule()
            runner.prefill(batch.prefill)
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            runner.decode(batch.decode)
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - start
            if batch.decode and runner.graphs is not None and (latest := runner.graphs.latest) is not None:
                # The graph of this step, its inputs still in place; what it writes again is the same or no longer read.
                times.append(time_events(latest.graph.replay, samples=7, per_sample=3, warm=1))
                if profile and all(request.level == len(request.widths) - 1 for request in active):
                    print_kernels(latest.graph.replay)
            elif batch.decode:
                times.append([taken * 1e6])
            choose(engine, batch)
            engine.finish(batch)
    return times


def parse_shape(text: str) -> tuple[int, int]:
    """`4x256`: requests and beams of each."""
    try:
        return read_shape(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_case(text: str) -> tuple[int, int, int | None]:
    """`4x256`, or `4x256:1024` for one length of the prompts alone."""
    shape, colon, length = text.partition(":")
    if colon and not (length.isdigit() and int(length)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: after the colon the tokens of a prompt, such as 4x256:1024"
        )
    return *parse_shape(shape), int(length) if colon else None


def fits(model: CausalLM, arm: str, case: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether a GPU's memory holds the requests of a case, by formula; anything fits where there is no GPU."""
    if not model.lm_head.weight.is_cuda or model.quantization != "none":
        return True
    dtype = model.lm_head.weight.dtype
    tokens = max(args.tokens)
    served = ServedModel(
        model.config.geometry,
        weight_bytes=module_bytes(model, dtype) + tokens * args.codebook * model.lm_head.weight[0].nbytes,
        row_bytes=row_bytes(model.config, dtype),
        num_codes=args.codebook,
        dtype=dtype,
        record_dtype=dtype,
        max_batch_tokens=0,  # prompts are not run here
    )
    size = RequestSize(case["prompt"], possible_widths(case["W"], args.codebook, tokens))
    return max_requests(served, arm, size, torch.cuda.mem_get_info()[1]).num_requests >= case["R"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--shapes",
        type=parse_case,
        nargs="+",
        help="several requests x beams instead, each with :TOKENS at will",
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--codebook", type=int, default=8192)
    parser.add_argument("--arms", nargs="+", default=[name for name, _ in VARIANTS])
    parser.add_argument("--elsewhere", nargs="+", help="arms of all shapes but the first; default: the same")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=CHOICES["quantization"], default="none")
    parser.add_argument("--samples", type=int, default=5, help="of each step")
    parser.add_argument("--tiny", action="store_true", help="a model of four small layers, to try the script")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-gate", action="store_true", help="where the gate has just passed")
    parser.add_argument(
        "--gate-only", action="store_true", help="answer real prompts in fp32 at the same shape, time nothing"
    )
    parser.add_argument(
        "--parts", action="store_true", help="time the first shape's kernels by what they are for"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of the first arm's steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    print(machine(), flush=True)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    shape = TINY if args.tiny else SHAPE_08B
    if args.gate_only:
        same_items_at_full_shape(shape, device, args)
        return
    if not args.no_gate:
        same_items_in_fp32(device)
    model = random_model(shape, dtype, device)
    if args.quantization == "fp8":
        model.quantize()
    vocabulary = vocabulary_of(max(args.tokens), args.codebook)
    failures = Failures()
    # What is alive now stays so: captures collect garbage, and need not look at it again and again.
    if device.type == "cuda":
        gc.collect()
        gc.freeze()
    for place, (requests, width, own) in enumerate(args.shapes or [(args.requests, args.width, None)]):
        arms = args.elsewhere if place and args.elsewhere else args.arms
        alone: list[float] | None = None
        if device.type == "cuda":
            alone = time_graph([matrix_products(model, requests * width)], samples=7)
            print(
                f"matrix products of a step, {requests * width} rows: {statistics.median(alone):.0f} us",
                flush=True,
            )
        for length in args.prompts if own is None else [own]:
            expected: list[Result] | None = None
            for name in arms:
                started = time.perf_counter()
                label = f"{name}, prompt {length}, {requests} x {width}"
                if time.perf_counter() - began > args.seconds:
                    failures.add(label, "no time was left")
                    continue
                case = {
                    "model": "tiny" if args.tiny else "qwen3.5-0.8b",
                    "R": requests,
                    "W": width,
                    "prompt": length,
                    "dtype": args.dtype,
                }
                if args.quantization != "none":
                    case["quantization"] = args.quantization
                if not fits(model, name, case, args):
                    report_no_room(name, case, args)
                    continue
                parts = args.parts and not place
                try:
                    measured = measure_arm(model, vocabulary, name, case, alone, expected, parts, args)
                    expected = expected or measured.results
                    share, _ = overlap(expected, measured.results)
                    if share < MIN_OVERLAP:
                        failures.add(label, f"{share:.2f} of the items of {arms[0]}, {MIN_OVERLAP} needed")
                except torch.OutOfMemoryError:
                    report_no_room(name, case, args)
                except Exception as error:  # the other arms are still worth their time
                    traceback.print_exc()
                    failures.add(label, repr(error))
                # Captured forwards and their engine hold each other.
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                print(f"    {time.perf_counter() - started:.2f} s in all", flush=True)
    failures.exit()


def measure_arm(
    model: CausalLM,
    vocabulary: SidVocabulary,
    name: str,
    case: dict[str, Any],
    alone: Sequence[float] | None,
    expected: Sequence[Result] | None,
    parts: bool,
    args: argparse.Namespace,
) -> StepTimes:
    """Measure one arm of one case and report it."""
    engine = engine_of(
        model, vocabulary, name, cuda_graphs=not args.no_graphs, quantization=model.quantization
    )
    sizes = case["R"], case["prompt"], case["W"]
    measured = measure_steps(engine, *sizes, samples=args.samples)
    if measured.failure is not None:
        print(f"{name}: no graphs: {measured.failure}", flush=True)
    quality = dict(
        zip(("overlap", "max_score_difference"), overlap(expected or measured.results, measured.results))
    )
    report(name, case, measured, alone, quality, args)
    if parts and measured.captured:
        report_parts(name, case, part_times(engine, *sizes, whole_steps=name == args.arms[0]), args)
    if args.profile and name == args.arms[0] and engine.runner.graphs is not None:
        steps = run_steps(engine, start(engine, *sizes[:2], BeamParams(beam_width=sizes[2])))
        for depth, step in enumerate(steps):
            if step.has_graph and depth in (0, len(steps) - 1):
                step.restore()
                print_kernels(step.graph.replay, title=f"step {depth}", count=20)
    return measured


def same_items_in_fp32(device: torch.device) -> None:
    """The gate: over a small fp32 model every arm returns the same items. Raises `SystemExit`."""
    model = random_model(TINY, torch.float32, device)
    vocabulary = SidVocabulary.from_token_ids([range(100 + 64 * i, 164 + 64 * i) for i in range(3)])
    requests = [Request(prompt_token_ids=list(range(length))) for length in (5, 70, 33)]
    answers = [answer(model, vocabulary, name, requests, 24) for name, _ in VARIANTS]
    for (name, _), results in zip(VARIANTS, answers):
        share, difference = overlap(answers[0], results)
        if share < 1 or difference > 1e-3:
            sys.exit(f"gate: {name} has {share:.3f} of the items, scores differ by {difference:.2g}")
    print("gate: every arm returns the same items in fp32", flush=True)


def answer(
    model: CausalLM, vocabulary: SidVocabulary, arm: str, requests: Sequence[Request], width: int
) -> list[Result]:
    """What an arm returns, its prompts really run."""
    engine = engine_of(model, vocabulary, arm, cuda_graphs=False)
    return engine.generate(requests, BeamParams(beam_width=width))


def same_items_at_full_shape(shape: dict[str, Any], device: torch.device, args: argparse.Namespace) -> None:
    """Every arm over a fp32 model of the measured shape, real prompts: one line each. Raises `SystemExit`."""
    model = random_model(shape, torch.float32, device)
    tokens, width = max(args.tokens), min(args.width, 64)
    vocabulary = vocabulary_of(tokens, min(args.codebook, (shape["vocab_size"] - 64) // tokens))
    generator = torch.Generator().manual_seed(0)
    lengths = (70, 33)
    requests = [
        Request(prompt_token_ids=torch.randint(0, 64, (length,), generator=generator).tolist())
        for length in lengths
    ]
    failures = Failures()
    expected: list[Result] | None = None
    for name in args.arms:
        with torch.inference_mode():
            results = answer(model, vocabulary, name, requests, width)
        expected = expected or results
        share, difference = overlap(expected, results)
        case = {
            "model": "tiny" if args.tiny else "qwen3.5-0.8b",
            "R": 2,
            "W": width,
            "O": tokens,
            "dtype": "float32",
        }
        append_result(
            "decode", arm=name, case=case, metric="same_items", unit="share", value=share,
            max_score_difference=difference, out=args.out, commit=args.commit,
        )  # fmt: skip
        print(f"{name:24s} fp32: {share:.4f} of the items, scores differ by {difference:.2g}", flush=True)
        if share < 1:
            failures.add(name, f"{share:.4f} of the items of {args.arms[0]}")
    failures.exit()


def report(
    name: str,
    case: dict[str, Any],
    measured: StepTimes,
    alone: Sequence[float] | None,
    quality: dict[str, float],
    args: argparse.Namespace,
) -> None:
    """Print a line and append the results, for every asked length of the SIDs."""
    where = {"out": args.out, "commit": args.commit}
    longest = len(measured.samples) + 1
    for tokens in sorted({min(asked, longest) for asked in args.tokens}):
        samples = measured.samples[: tokens - 1]
        steps = [statistics.median(taken) for taken in samples]
        whole = sum(steps)
        floor = None if alone is None else statistics.median(alone) * len(steps) / 1e3
        spread = [sum(map(min, samples)) / 1e3, sum(map(max, samples)) / 1e3]
        more = quality if tokens == longest else {}
        append_result(
            "decode", arm=name, case=case | {"O": tokens}, metric="decode_forward", unit="ms", value=whole / 1e3,
            spread=spread, floor=floor, steps_us=[round(s, 1) for s in steps], **more, **where,
        )  # fmt: skip
        ratio = "" if floor is None else f", {whole / floor / 1e3:.2f}x its matrix products"
        print(
            f"{name:24s} {case['R']} x {case['W']}, prompt {case['prompt']}, O={tokens}: {whole / 1e3:.3f} ms{ratio}",
            flush=True,
        )
    print(
        f"    steps {' '.join(f'{statistics.median(s):.0f}' for s in measured.samples)} us; beams "
        f"{measured.sizes['beam_state'] / 2**20:.0f} MiB, all {measured.sizes['state'] / 2**20:.0f}; overlap "
        f"{quality['overlap']:.3f}, scores differ by {quality['max_score_difference']:.3f}",
        flush=True,
    )
    for metric, value in measured.sizes.items():
        append_result(
            "decode", arm=name, case=case | {"O": longest}, metric=metric, unit="bytes", value=value, **where
        )


def report_parts(name: str, case: dict[str, Any], parts: dict[str, float], args: argparse.Namespace) -> None:
    """A line for every part of the steps; its share is that of the forwards."""
    total = sum(taken for part, taken in parts.items() if part != "head_selection")
    for part, taken in parts.items():
        append_result(
            "decode", arm=name, case=case | {"O": max(args.tokens), "part": part}, metric="part_time", unit="ms",
            value=taken / 1e3, share=round(taken / total, 4), out=args.out, commit=args.commit,
        )  # fmt: skip
    print("    " + ", ".join(f"{part} {taken / 1e3:.2f} ms" for part, taken in parts.items()), flush=True)


def report_no_room(name: str, case: dict[str, Any], args: argparse.Namespace) -> None:
    """Lines that say that an arm does not fit into the GPU's memory."""
    print(f"{name:24s} {case['R']} x {case['W']}, prompt {case['prompt']}: does not fit", flush=True)
    for tokens in args.tokens:
        append_result(
            "decode", arm=name, case=case | {"O": tokens}, metric="decode_forward", unit="ms", value=None,
            note="does not fit", out=args.out, commit=args.commit,
        )  # fmt: skip


if __name__ == "__main__":
    main()
