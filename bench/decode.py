"""The decode forward of a whole model, every arm on one pipeline: one option of the engine is changed, nothing else.

The model has Qwen3.5-0.8B's shape (18 Gated DeltaNet and 6 softmax layers) and random weights. For every arm the
requests are answered once, and their items are held against the first arm's; then every decode step is timed as the
replay of its CUDA graph, and the matrix products of a step alone, on as many rows, in the same run.

    python bench/decode.py [--prompts 1024 5120] [--tokens 3 7] [--arms replay full_state_copy ...]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import Failures, append_result, machine, time_events, time_graph
from onela import BeamParams, Engine, EngineConfig, Request, Result, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, matrix_products, overlap, random_model
from onela.engine.verify import VARIANTS
from onela.models import CausalLM

MIN_OVERLAP = 0.7
"""Least share of items that an arm must have in common with the first. In bf16 every layer rounds, and each arm rounds
other numbers, so beams near the border change places; in fp32 the arms agree (`tests/engine/test_gpu.py`)."""


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
            hidden = runner.prefill(batch.prefill)
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            hidden += [rows.clone() for rows in runner.decode(batch.decode)]
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - start
            survivors = engine._select(batch, hidden)
            if batch.decode and runner.graphs is not None and runner.graphs.failure is None:
                # The graph of this step, its inputs still in place; what it writes again is the same or no longer read.
                graph = next(reversed(runner.graphs._graphs.values())).graph
                times.append(time_events(graph.replay, samples=7, per_sample=3, warm=1))
                if profile and all(request.level == len(request.widths) - 1 for request in active):
                    print_kernels(graph.replay)
            elif batch.decode:
                times.append([taken * 1e6])
            for request, beams in zip(batch.requests, survivors):
                request.advance(beams)
            engine._finish(batch)
    return times


def run_arm(
    model: CausalLM,
    vocabulary: SidVocabulary,
    requests: Sequence[Request],
    width: int,
    options: dict[str, Any],
    *,
    profile: bool = False,
) -> tuple[list[Result], list[list[float]], dict[str, int], str | None]:
    """Items, times of the steps, bytes, and why there are no graphs (None: there are)."""
    config = EngineConfig(max_batch_tokens=1 << 20, **options)
    engine = Engine(model, vocabulary, config=config)
    params = BeamParams(beam_width=width)
    results = engine.generate(requests, params)
    times = time_steps(engine, requests, params, profile=profile)
    state = engine.state
    prompts = sum(
        t.nbytes
        for name, t in state.prompts.prompt_tensors.tensors.items()
        if name.endswith("recurrent_state")
    )
    sizes = {"beam_state": state.backend.nbytes, "prompt_state": prompts, "records": state.records.nbytes}
    graphs = engine.runner.graphs
    return results, times, sizes, None if graphs is None or graphs.failure is None else repr(graphs.failure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--codebook", type=int, default=8192)
    parser.add_argument("--arms", nargs="+", default=[name for name, _ in VARIANTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a model of four small layers, to try the script")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument(
        "--no-gate", action="store_true", help="where tests/engine/test_gpu.py has just passed"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of the first arm's last step"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    print(machine(), flush=True)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if not args.no_gate:
        same_items_in_fp32(device)
    shape = TINY if args.tiny else SHAPE_08B
    model = random_model(shape, dtype, device)
    rows = args.requests * args.width
    failures = Failures()
    alone: list[float] | None = None
    if device.type == "cuda":
        alone = time_graph([matrix_products(model, rows)])
        print(f"matrix products of a step, {rows} rows: {statistics.median(alone):.0f} us", flush=True)
    for length in args.prompts:
        for tokens in args.tokens:
            vocabulary = SidVocabulary.from_token_ids(
                [range(64 + i * args.codebook, 64 + (i + 1) * args.codebook) for i in range(tokens)]
            )
            generator = torch.Generator().manual_seed(length + tokens)
            requests = [
                Request(prompt_token_ids=torch.randint(0, 64, (length,), generator=generator).tolist())
                for _ in range(args.requests)
            ]
            expected: list[Result] | None = None
            for name in args.arms:
                label = f"{name}, prompt {length}, O={tokens}"
                if time.perf_counter() - began > args.seconds:
                    failures.add(label, "no time was left")
                    continue
                case = {
                    "model": "tiny" if args.tiny else "qwen3.5-0.8b",
                    "R": args.requests,
                    "W": args.width,
                    "prompt": length,
                    "O": tokens,
                    "dtype": args.dtype,
                }
                try:
                    options = dict(VARIANTS)[name] | {"cuda_graphs": not args.no_graphs}
                    profile = args.profile and name == args.arms[0]
                    results, times, sizes, failure = run_arm(
                        model, vocabulary, requests, args.width, options, profile=profile
                    )
                    if failure is not None:
                        print(f"{name}: no graphs: {failure}", flush=True)
                    expected = expected or results
                    share, difference = overlap(expected, results)
                    report(name, case, times, sizes, alone, share, difference, args)
                    if share < MIN_OVERLAP:
                        failures.add(
                            label, f"{share:.2f} of the items of {args.arms[0]}, {MIN_OVERLAP} needed"
                        )
                except Exception as error:  # the other arms are still worth their time
                    traceback.print_exc()
                    failures.add(label, repr(error))
                # Captured forwards and their engine hold each other.
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    failures.exit()


def same_items_in_fp32(device: torch.device) -> None:
    """The gate: over a small fp32 model every arm returns the same items. Raises `SystemExit`."""
    model = random_model(TINY, torch.float32, device)
    vocabulary = SidVocabulary.from_token_ids([range(100 + 64 * i, 164 + 64 * i) for i in range(3)])
    requests = [Request(prompt_token_ids=list(range(length))) for length in (5, 70, 33)]
    expected: list[Result] | None = None
    for name, options in VARIANTS:
        engine = Engine(model, vocabulary, config=EngineConfig(**options))
        results = engine.generate(requests, BeamParams(beam_width=24))
        expected = expected or results
        share, difference = overlap(expected, results)
        if share < 1 or difference > 1e-3:
            sys.exit(f"gate: {name} has {share:.3f} of the items, scores differ by {difference:.2g}")
    print("gate: every arm returns the same items in fp32", flush=True)


def report(
    name: str,
    case: dict[str, Any],
    times: Sequence[Sequence[float]],
    sizes: dict[str, int],
    alone: Sequence[float] | None,
    share: float,
    difference: float,
    args: argparse.Namespace,
) -> None:
    """Print a line and append the results."""
    steps = [statistics.median(samples) for samples in times]
    whole = sum(steps)
    floor = None if alone is None else statistics.median(alone) * len(steps)
    spread = (sum(map(min, times)), sum(map(max, times)))
    quality = {"overlap": share, "max_score_difference": difference}
    where = {"out": args.out, "commit": args.commit}
    append_result(
        "decode", arm=name, case=case, metric="decode_forward", unit="ms", value=whole / 1e3,
        spread=[s / 1e3 for s in spread], floor=None if floor is None else floor / 1e3,
        steps_us=[round(s, 1) for s in steps], **quality, **where,
    )  # fmt: skip
    for metric, value in sizes.items():
        append_result("decode", arm=name, case=case, metric=metric, unit="bytes", value=value, **where)
    ratio = "" if floor is None else f", {whole / floor:.2f}x its matrix products"
    print(
        f"{name:24s} prompt {case['prompt']} O={case['O']}: {whole / 1e3:.3f} ms{ratio}; steps "
        f"{' '.join(f'{s:.0f}' for s in steps)} us; beams {sizes['beam_state'] / 2**20:.0f} MiB; "
        f"overlap {share:.3f}, scores differ by {difference:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
