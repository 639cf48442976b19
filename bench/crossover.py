"""Where replay stops paying: a decode step at every depth up to that of SIDs of 64 tokens and more.

Records grow with the depth, a state does not. One step is timed by itself, as a CUDA graph, over beams that have `t`
ancestors each: of a whole model (Qwen3.5-0.8B's shape), and of its recurrent operator alone (reordering, then the
recurrence of four layers, divided by four). Trees: `random`, each beam's parent drawn at random and sorted, so that
beams share ancestors as the survivors of a search do; `chain`, no two beams of a request share any, which costs replay
most.

    python bench/crossover.py [--what operator model] [--depths 0 1 ... 63]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import Failures, append_result, machine, time_graph
from bench.decode import parse_shape
from onela.bench.models import SHAPE_08B, TINY, engine_of, random_model, vocabulary_of
from onela.bench.operator import OPERATOR_LAYERS, fill, operator, operator_step, step_inputs
from onela.engine import Engine
from onela.state import StepInputs

ARMS = ("replay", "full_state_copy", "full_state_read_parent", "replay_ssm", "replay_ssm_shared")
MODEL_DEPTHS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 63)
OPERATOR_DEPTHS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 63, 95, 127, 191, 255)


def model_step(engine: Engine, inputs: StepInputs) -> Callable[[], Any]:
    return lambda: engine.runner.forward(inputs)


def prepare_model(arm: str, model: Any, requests: int, width: int, prompt: int, max_depth: int) -> Engine:
    """An engine that has room for the deepest step."""
    levels = max_depth + 1
    engine = engine_of(model, vocabulary_of(levels, min(512, (model.config.vocab_size - 64) // levels)), arm)
    prompts = engine.state.prompts
    for _ in range(requests):
        prompts.extend(prompts.allocate(prompt), prompt)
    for tensor in [*prompts.prompt_tensors.tensors.values(), *prompts.page_tensors.tensors.values()]:
        tensor.normal_(0, 0.1)
    engine.state.records.admit(requests * width * (max_depth + 1), num_spare=0)
    engine.state.backend.reserve(requests * width, max_depth + 1)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=["operator", "model"], default=["operator", "model"])
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(4, 256)])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument(
        "--depths", type=int, nargs="+", help="ancestors of a beam; default: up to 63, or 255 alone"
    )
    parser.add_argument("--trees", nargs="+", choices=["random", "chain"], default=["random", "chain"])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run once on any device, a small model, no times")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further arm after this time")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    print(machine(), flush=True)
    device = torch.device(args.device)
    failures = Failures()
    model = None
    if "model" in args.what:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = random_model(TINY if args.tiny else SHAPE_08B, dtype, device)
    if device.type == "cuda":
        # What is alive now stays so: captures collect garbage, and need not look at it again and again.
        gc.collect()
        gc.freeze()
    for what in args.what:
        for requests, width in args.shapes:
            for arm in args.arms:
                if time.perf_counter() - began > args.seconds:
                    failures.add(f"{what}, {arm}", "no time was left")
                    continue
                try:
                    with torch.inference_mode():
                        run_arm(what, arm, model, requests, width, args)
                except Exception as error:  # the other arms are still worth their time
                    traceback.print_exc()
                    failures.add(f"{what}, {arm}, {requests} x {width}", repr(error))
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    failures.exit()


def run_arm(what: str, arm: str, model: Any, requests: int, width: int, args: argparse.Namespace) -> None:
    """Every depth and tree of one arm."""
    device = torch.device(args.device)
    depths = args.depths or (MODEL_DEPTHS if what == "model" else OPERATOR_DEPTHS)
    if what == "operator" and arm == "replay_ssm" and not args.depths:
        depths = [
            t for t in depths if t < 64
        ]  # a buffer of 255 per beam would not fit beside the checkpoints
    deepest = max(depths)
    if arm.startswith("full_state") and not args.depths:
        depths = [0, 1, 2, deepest]  # a state is as large at every depth
    if what == "model":
        engine = prepare_model(arm, model, requests, width, args.prompt, deepest)
        backend, parts = engine.state.backend, 1
    else:
        backend, parts = operator(arm, requests, width, deepest, device), OPERATOR_LAYERS
    fill(backend)
    held = backend.nbytes // (len(backend.geometry) or 1)
    shown = []
    for kind in args.trees:
        if kind == "chain" and arm != "replay":
            continue  # the others copy or keep what they need, whosoever it was
        for depth in depths:
            inputs = step_inputs(requests, width, depth, args.prompt, kind, device)
            step = model_step(engine, inputs) if what == "model" else operator_step(backend, inputs)
            if args.tiny:
                step()
                continue
            samples = [us / parts for us in time_graph([step], samples=args.samples, target_us=2000)]
            case = {"what": what, "R": requests, "W": width, "t": depth, "tree": kind}
            if what == "model":
                case["prompt"] = args.prompt
            value = statistics.median(samples)
            shown.append(f"{depth}: {value:.0f}")
            append_result(
                "crossover", arm=arm, case=case, metric="time", unit="us", value=value,
                spread=[min(samples), max(samples)], out=args.out, commit=args.commit,
            )  # fmt: skip
        print(f"{what} {arm} {kind} {requests} x {width}, us at t = {', '.join(shown)}", flush=True)
        shown.clear()
    if not args.tiny:
        case = {"what": what, "R": requests, "W": width, "T": deepest + 1}
        append_result(
            "crossover", arm=arm, case=case, metric="beam_state_per_layer", unit="bytes", value=held,
            out=args.out, commit=args.commit,
        )  # fmt: skip


if __name__ == "__main__":
    main()
