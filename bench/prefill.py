"""Prefill of packed prompts through a whole model: a captured forward beside its matrix products alone.

First a gate: hidden rows of ragged prompts, at once and in pieces, captured and not, against the references in fp32.
Then, for each case, the GPU time of the replayed graph, the time from tokens on the host to the last kernel's end
("request"), and the same forward launched kernel by kernel. A case `BxL` is B prompts of L tokens; `BxL/C` lets each go
on from C tokens that it holds already, as after a hit in the prompt cache. A case may name its model, as in
`qwen3-1.7b:1x5000`.

    python bench/prefill.py [--model qwen3.5-0.8b] [--cases 4x1024 1x5120 4x5120 1x5120/4608 4x5120/4608] [--profile]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import Failures, append_result, machine, time_events, time_graph
from bench.decode import print_kernels
from onela import BeamParams, Engine, EngineConfig, Request, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, matrix_products, random_model
from onela.engine.active import ActiveRequest
from onela.engine.prefill_packing import eager_inputs
from onela.engine.scheduler import PrefillChunk
from onela.models import CausalLM

QWEN3_17B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
MODELS: dict[str, dict[str, Any]] = {"qwen3.5-0.8b": SHAPE_08B, "qwen3-1.7b": QWEN3_17B, "tiny": TINY}
GATE_LENGTHS = ((700, 64, 131, 1), (900,), (600, 590))
GATE_FACTOR = 1.5
"""How much farther from the fp32 references a captured bf16 forward may be than the bf16 references are."""


def engine_of(model: CausalLM, *, graphs: bool = True) -> Engine:
    """An engine that runs prompts of any length in one piece."""
    vocabulary = SidVocabulary.from_token_ids([range(64, 128), range(128, 192)])
    # Prompts are run one after the other here, and none is decoded.
    config = EngineConfig(max_batch_tokens=1 << 20, max_tokens_beside_decode=None, cuda_graphs=graphs)
    return Engine(model, vocabulary, config=config)


def admitted(engine: Engine, lengths: Sequence[int]) -> list[ActiveRequest]:
    """Requests with random prompts of these lengths, in their places."""
    generator = torch.Generator().manual_seed(sum(lengths))
    active = []
    for length in lengths:
        tokens = torch.randint(0, 64, (length,), generator=generator).tolist()
        request = engine.prepare(Request(prompt_token_ids=tokens), BeamParams(beam_width=4))
        engine.scheduler.add(request)
        active.append(request)
    engine.scheduler.schedule()
    return active


def run_pieces(engine: Engine, lengths: Sequence[int], cuts: Sequence[int], *, reference: bool) -> Tensor:
    """The last hidden rows [B, D], in fp32, of prompts that are run up to each cut and then to their ends."""
    active = admitted(engine, lengths)
    edges = [0, *cuts, max(lengths)]
    rows: dict[int, Tensor] = {}
    for start, end in itertools.pairwise(edges):
        chunks = [
            PrefillChunk(r, start, min(end, len(r.prompt_token_ids)))
            for r in active
            if len(r.prompt_token_ids) > start
        ]
        if reference:
            inputs = replace(eager_inputs(chunks, engine.state.prompts, engine.device), tables=None)
            hidden = list(engine.model.prefill(inputs, engine.state).split(1))
            for chunk in chunks:
                engine.state.prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
            hidden = [row for row, chunk in zip(hidden, chunks) if chunk.completes]
        else:
            hidden = engine.runner.prefill(chunks)
        done = [chunk.request for chunk in chunks if chunk.completes]
        rows |= {id(request): row.float().clone() for request, row in zip(done, hidden)}
    for request in active:
        engine.cancel(request)
    return torch.cat([rows[id(request)] for request in active])


def error(given: Tensor, wanted: Tensor) -> float:
    """Root of the mean squared difference, relative to what is wanted."""
    return float((given - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def gate(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises `SystemExit` unless every road gives the references' hidden rows."""
    values = MODELS[name] | {"num_hidden_layers": 4, "vocab_size": 2048}
    exact = engine_of(random_model(values, torch.float32, device), graphs=False)
    model = random_model(values, dtype, device)
    for (_, own), (_, given) in zip(model.named_parameters(), exact.model.named_parameters()):
        own.data.copy_(given.data)
    for lengths in GATE_LENGTHS:
        wanted = run_pieces(exact, lengths, (), reference=True)
        allowed = (
            GATE_FACTOR * error(run_pieces(engine_of(model), lengths, (), reference=True), wanted) + 1e-3
        )
        for graphs, cuts in itertools.product((True, False), ((), (63, 128, 640))):
            engine = engine_of(model, graphs=graphs)
            found = error(run_pieces(engine, lengths, cuts, reference=False), wanted)
            # Again: the places and pages now hold what the first run left there.
            again = error(run_pieces(engine, lengths, cuts, reference=False), wanted)
            captured = engine.runner.prefill_graphs
            failure = None if captured is None else captured.failure
            print(
                f"gate: {lengths} {'captured' if graphs else 'launched'}, cut at {cuts}: error {found:.2e}, "
                f"{again:.2e}; allowed {allowed:.2e}; {failure or 'no failure'}",
                flush=True,
            )
            if not max(found, again) <= allowed:
                sys.exit("gate: hidden rows differ from the references'")
            if failure is not None:
                sys.exit(f"gate: a prefill forward was not captured: {failure!r}")


def parse(case: str) -> tuple[int, int, int]:
    """Prompts, tokens and cached tokens of a case."""
    count, _, rest = case.partition("x")
    length, _, cached = rest.partition("/")
    return int(count), int(length), int(cached or 0)


def measure(engine: Engine, model: str, case: str, args: argparse.Namespace) -> None:
    """Time one case, print it and append its lines."""
    count, length, cached = parse(case)
    runner, pool = engine.runner, engine.state.prompts
    active = admitted(engine, [length] * count)
    if cached:
        runner.prefill([PrefillChunk(request, 0, cached) for request in active])
    chunks = [PrefillChunk(request, cached, length) for request in active]
    rows = count * (length - cached)
    start = time.perf_counter()
    runner.prefill(chunks)
    torch.cuda.synchronize()
    first = (time.perf_counter() - start) * 1e3
    graphs = runner.prefill_graphs
    if graphs is None or (graph := graphs.latest) is None:
        raise RuntimeError(f"not captured: {graphs and graphs.failure!r}")
    # A replay runs the same tokens again: other states go in, and nothing depends on what they are.
    times = time_events(graph.graph.replay, samples=args.samples, per_sample=1, warm=2)
    if args.profile:
        print_kernels(graph.graph.replay, count=24, title=f"a replay of {case}")
    request = []
    for _ in range(args.samples):
        start = time.perf_counter()
        graphs.run(chunks)
        torch.cuda.synchronize()
        request.append((time.perf_counter() - start) * 1e6)
    launched = []
    for _ in range(4):
        start = time.perf_counter()
        runner.prefill_forward(eager_inputs(chunks, pool, engine.device))
        torch.cuda.synchronize()
        launched.append((time.perf_counter() - start) * 1e6)
    products = time_graph([matrix_products(engine.model, rows)], samples=7)
    for one in active:
        engine.cancel(one)
    values = {
        "model": model,
        "prompts": count,
        "tokens": length,
        "cached": cached,
        "dtype": args.dtype,
    }
    shape = graph.buffers.shape
    more = {"padded_tokens": shape.num_tokens, "out": args.out, "commit": args.commit}
    floor = statistics.median(products) / 1e3
    for arm, metric, samples in (
        ("captured", "prefill", times),
        ("captured", "prefill_request", request),
        ("launched", "prefill_request", launched[1:]),
    ):
        append_result(
            "prefill", arm=arm, case=values, metric=metric, unit="ms", value=statistics.median(samples) / 1e3,
            spread=[min(samples) / 1e3, max(samples) / 1e3], floor=floor, **more,
        )  # fmt: skip
    append_result(
        "prefill", arm="captured", case=values, metric="prefill_first", unit="ms", value=first, **more
    )
    print(
        f"{model} {case}: replay {statistics.median(times) / 1e3:.2f} ms, "
        f"{statistics.median(times) / 1e3 / floor:.2f}x its matrix products ({floor:.2f} ms); from the host "
        f"{statistics.median(request) / 1e3:.2f} ms; launched {statistics.median(launched[1:]) / 1e3:.2f} ms; first "
        f"{first:.0f} ms; {shape}",
        flush=True,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3.5-0.8b")
    parser.add_argument(
        "--cases", nargs="+", default=["4x1024", "1x5120", "4x5120", "1x5120/4608", "4x5120/4608"]
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--no-gate", action="store_true", help="where the gate has just passed")
    parser.add_argument("--only-gate", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each case's replay")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(machine(), flush=True)
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    began = time.perf_counter()
    if not args.no_gate:
        gate(args.model, device, dtype)
        print(f"gate: passed in {time.perf_counter() - began:.1f} s", flush=True)
    if args.only_gate:
        return
    failures = Failures()
    engine: Engine | None = None
    loaded = ""
    for named in args.cases:
        model, _, case = named.rpartition(":")
        model = model or args.model
        try:
            if engine is None or loaded != model:
                engine, loaded = engine_of(random_model(MODELS[model], dtype, device)), model
            measure(engine, model, case, args)
        except Exception as why:  # the other cases are still worth their time
            failures.add(named, f"{type(why).__name__}: {why}")
        gc.collect()
    failures.exit()


if __name__ == "__main__":
    main()
