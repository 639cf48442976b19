"""Whole requests of the dense Qwen3 recommenders, and decode steps of a mixture of experts, with random weights.

The shapes are those of the public checkpoints; the prompt is random. A request is timed as `Engine.generate` sees it:
from the call to the list of items, prompt, decode steps, selections and results included. `decode` is what comes after
the first token is chosen, on the GPU's clock: forwards, selections, and what lies between them.

    python bench/qwen3.py [--cases 1.7b 0.6b moe] [--profile]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import cProfile
import gc
import io
import pstats
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import append_result, machine, time_graph
from bench.decode import print_kernels, time_steps
from onela import BeamParams, Engine, EngineConfig, Request, SidVocabulary
from onela.bench.models import matrix_products, random_model
from onela.decoding import BeamSearch
from onela.engine.scheduler import Batch
from onela.engine.served import ServedCatalog
from onela.items import ItemTrie

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN3_1_7B = {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_0_6B = {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072}
# Qwen3-Next-80B-A3B's layers, four of its 48.
QWEN3_NEXT_4: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMALL_NEXT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        model: its name. shape: `config.json`. prompt: tokens. width: beams. requests: answered together.
    """

    model: str
    shape: dict[str, Any]
    prompt: int
    width: int
    requests: int = 1


CASES = {
    "1.7b": Case("qwen3-1.7b", QWEN3_1_7B, 5000, 256),
    "0.6b": Case("qwen3-0.6b", QWEN3_0_6B, 1000, 5000),
    "moe": Case("qwen3-next, 4 layers", QWEN3_NEXT_4, 1024, 256, 4),
}


class Marks:
    """When the selections of a request were done, on the GPU's clock (on a CPU: the host's)."""

    def __init__(self, engine: Engine) -> None:
        self.on_gpu = engine.device.type == "cuda"
        self.marks: list[Any] = []
        run = engine.runner.run

        def marked(batch: Batch) -> None:
            run(batch)
            if batch.requests:
                self.add()

        engine.runner.run = marked  # type: ignore[method-assign]

    def add(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self, first: int, last: int) -> float:
        """Milliseconds from one mark to another."""
        a, b = self.marks[first], self.marks[last]
        return a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3


def time_requests(
    engine: Engine, requests: Callable[[], Sequence[Request]], params: BeamParams, repeat: int, warm: int
) -> dict[str, list[float]]:
    """Milliseconds of whole requests, and of their two parts on the GPU's clock, one of each per repetition."""
    marks = Marks(engine)
    times: dict[str, list[float]] = {"request": [], "prefill": [], "decode": []}
    for i in range(warm + repeat):
        asked = requests()
        marks.marks.clear()
        _wait(engine)
        begin = time.perf_counter()
        marks.add()
        results = engine.generate(asked, params)
        whole = time.perf_counter() - begin
        assert all(result.finish_reason == "stop" for result in results)
        if i >= warm:
            times["request"].append(whole * 1e3)
            times["prefill"].append(marks.between(0, 1))
            times["decode"].append(marks.between(1, -1))
    return times


def _wait(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def print_profile(engine: Engine, requests: Callable[[], Sequence[Request]], params: BeamParams) -> None:
    """Where the host's time of one request goes, and the GPU's."""
    profile = cProfile.Profile()
    asked = requests()
    _wait(engine)
    profile.enable()
    engine.generate(asked, params)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(28)
    print("\n".join(line[:130] for line in text.getvalue().splitlines() if line.strip()), flush=True)
    if engine.device.type == "cuda":
        asked = requests()
        print_kernels(lambda: engine.generate(asked, params), count=36, title="one request")


@lru_cache(maxsize=1)
def trie_of(num_items: int, codebook: int, seed: int = 0) -> ItemTrie:
    """A trie of this many random SIDs of three levels."""
    generator = np.random.default_rng(seed)
    return ItemTrie.from_sids(
        generator.integers(0, codebook, (num_items, 3), dtype=np.int32), (codebook,) * 3
    )


def run_case(name: str, args: argparse.Namespace) -> None:
    """Measure one case and append its lines."""
    case, device, dtype = CASES[name], torch.device(args.device), getattr(torch, args.dtype)
    shape, codebook = dict(case.shape), args.codebook
    if args.tiny:
        shape |= SMALL | (SMALL_NEXT if shape["model_type"] == "qwen3_next" else {})
        codebook = 256
    model = random_model(shape, dtype, device)
    first = 64
    vocabulary = SidVocabulary.from_token_ids(
        [range(first + i * codebook, first + (i + 1) * codebook) for i in range(3)]
    )
    generator = torch.Generator().manual_seed(0)

    def requests() -> list[Request]:
        """Other prompts every time."""
        prompts = torch.randint(0, first, (case.requests, case.prompt), generator=generator)
        return [Request(prompt_token_ids=prompt) for prompt in prompts.tolist()]

    params = BeamParams(beam_width=case.width)
    about = {
        "model": f"{case.model}, tiny" if args.tiny else case.model,
        "R": case.requests,
        "W": case.width,
        "prompt": case.prompt,
        "O": 3,
        "dtype": args.dtype,
    }
    where = {"out": args.out, "commit": args.commit}
    options: dict[str, Any] = {"max_batch_tokens": 1 << 16}
    engine = Engine(model, vocabulary, config=EngineConfig(**options))
    decode = measure(engine, "free", case, about, requests, params, args)
    if args.profile:
        print_profile(engine, requests, params)
    steps = time_steps(engine, requests(), params, profile=args.profile)
    alone = None
    if device.type == "cuda" and model.config.moe is None:
        alone = statistics.median(time_graph([matrix_products(model, case.width * case.requests)]))
    graphs = engine.runner.graphs
    if graphs is not None and graphs.failure is not None:
        print(f"{case.model}: no graphs: {graphs.failure!r}", flush=True)
    values = [statistics.median(samples) / 1e3 for samples in steps]
    append_result(
        "qwen3", arm="free", case=about, metric="step_time", unit="ms", value=statistics.mean(values),
        spread=[min(map(min, steps)) / 1e3, max(map(max, steps)) / 1e3],
        floor=None if alone is None else alone / 1e3, captured=graphs is not None and graphs.failure is None, **where,
    )  # fmt: skip
    floor = "" if alone is None else f", its matrix products alone {alone / 1e3:.3f} ms"
    print(f"{case.model}: decode steps {' '.join(f'{v:.3f}' for v in values)} ms{floor}", flush=True)
    if args.items:
        trie = trie_of(args.items, codebook).to(device)
        engine.catalogs._active = ServedCatalog(None, BeamSearch(trie), None, None)
        constrained = measure(engine, f"{args.items} items", case, about, requests, params, args)
        share = 100 * (constrained - decode) / constrained
        print(f"{case.model}: the constraint takes {share:.2f} % of decode", flush=True)
        append_result(
            "qwen3",
            arm=f"{args.items} items",
            case=about,
            metric="constraint_share",
            unit="%",
            value=share,
            **where,
        )
    if name in args.fp8:
        del engine
        gc.collect()
        model.quantize()
        engine = Engine(model, vocabulary, config=EngineConfig(quantization="fp8", **options))
        measure(engine, "free, fp8", case, about, requests, params, args)


def measure(
    engine: Engine,
    arm: str,
    case: Case,
    about: dict[str, Any],
    requests: Callable[[], Sequence[Request]],
    params: BeamParams,
    args: argparse.Namespace,
) -> float:
    """Time whole requests and append their lines; returns the median of decode."""
    times = time_requests(engine, requests, params, args.repeat, args.warm)
    for metric, samples in times.items():
        p90 = sorted(samples)[round(0.9 * (len(samples) - 1))]
        value = statistics.median(samples)
        print(
            f"{case.model} W={case.width} prompt {case.prompt} {arm}: {metric} {value:.2f} ms "
            f"({min(samples):.2f} to {max(samples):.2f}, p90 {p90:.2f})",
            flush=True,
        )
        append_result(
            "qwen3", arm=arm, case=about, metric=f"{metric}_time", unit="ms", value=value,
            spread=[min(samples), max(samples)], p90=p90, repetitions=len(samples), out=args.out, commit=args.commit,
        )  # fmt: skip
    return statistics.median(times["decode"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--codebook", type=int, default=8192)
    parser.add_argument("--items", type=int, default=0, help="a second arm with a catalogue of so many items")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument(
        "--fp8", nargs="*", choices=list(CASES), default=[], help="cases with a last arm in float8"
    )
    parser.add_argument("--profile", action="store_true", help="print where a request's time goes")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(machine(), flush=True)
    for name in args.cases:
        try:
            run_case(name, args)
        except Exception:  # the other cases are still worth their time
            traceback.print_exc()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
