"""Whether the answer of `onela capacity` is true: as many requests as fit are held and decoded, 5 % more are not.

A model of Qwen3.5-0.8B's shape gets an engine whose limits are those of the answer, its pools allocated at the start.
All requests are admitted before the first decode step, so that all of them are held at once; then they are decoded.
Only the first prompts are run, as many as fill one forward; the states of the others are random numbers. Then the same
is tried with 5 % more requests, which must end in `OutOfMemoryError`. On a GPU the memory of the process is cut to
`--memory`.

    python bench/capacity.py [--memory 139GiB] [--arms replay full_state_copy]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import gc
import time
from pathlib import Path

import torch

from bench.common import Failures, append_result, machine
from onela import BeamParams, Engine, EngineConfig, Request, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, random_model
from onela.cli.capacity import read_memory
from onela.engine.scheduler import Batch
from onela.engine.verify import VARIANTS
from onela.models import CausalLM
from onela.models.footprint import module_bytes, row_bytes
from onela.state.capacity import Fit, RequestSize, ServedModel, max_requests, spare_slots


def make_engine(
    model: CausalLM, vocabulary: SidVocabulary, served: ServedModel, arm: str, size: RequestSize, count: int
) -> Engine:
    """An engine whose pools hold exactly `count` requests of this size, allocated at once."""
    config = EngineConfig(
        max_prompts=count,
        max_slots=count * size.num_slots + spare_slots(served, size, count),
        max_pages=count * -(-size.prompt_tokens // served.page_size),
        max_batch_rows=served.max_batch_rows,
        max_batch_tokens=served.max_batch_tokens,
        preallocate=True,
        **dict(VARIANTS)[arm],
    )
    engine = Engine(model, vocabulary, config=config)
    engine.state.backend.reserve(count * size.num_rows, len(size.widths) - 1)
    # Spare slots for full forwards first: then no request's extent has to lie around them.
    engine.state.records.admit(0, spare_slots(served, size, count))
    return engine


def hold_and_decode(engine: Engine, size: RequestSize, count: int, width: int) -> tuple[int, int]:
    """Hold all requests, then decode them; the most that were held at a time, and how many were answered.

    Raises:
        OutOfMemoryError: a request failed, or a forward could not be captured: there was no room.
    """
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 64, (count, size.prompt_tokens), generator=generator).tolist()
    active = [engine.prepare(Request(prompt_token_ids=row), BeamParams(beam_width=width)) for row in tokens]
    held, last = 0, torch.empty(0)
    pools = (engine.state.prompts.prompt_tensors, engine.state.prompts.page_tensors)
    for tensor in [tensor for pool in pools for tensor in pool.tensors.values()]:
        tensor.normal_(0, 0.1)
    with torch.inference_mode():
        for request in active:
            engine.scheduler.add(request)
        while engine.scheduler.waiting or any(request.in_prefill for request in engine.scheduler.running):
            prefill = engine.scheduler.schedule().prefill
            if not prefill:
                break
            batch = Batch(prefill=prefill)
            if not held:
                hidden = engine.runner.prefill(prefill)
            else:
                for chunk in prefill:
                    assert chunk.request.prompt is not None
                    engine.state.prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
                hidden = [last for chunk in prefill if chunk.completes]
            last = hidden[0] if hidden else last
            for request, beams in zip(batch.requests, engine._select(batch, hidden)):
                request.advance(beams)
            held = max(held, len(engine.scheduler.running))
        while engine.scheduler.has_work:
            engine.step()
            graphs = [engine.runner.graphs, engine.runner.prefill_graphs]
            if any(isinstance(request.outcome, Exception) for request in active):
                raise torch.OutOfMemoryError("a request failed")
            if any(one is not None and one.failure is not None for one in graphs):
                raise torch.OutOfMemoryError("a forward was not captured")
    return held, sum(not isinstance(request.outcome, Exception) for request in active)


def try_arm(
    model: CausalLM,
    vocabulary: SidVocabulary,
    served: ServedModel,
    arm: str,
    size: RequestSize,
    count: int,
    width: int,
) -> dict[str, int] | None:
    """What was held and answered, and the largest memory; None: there was no memory for it."""
    cuda = model.lm_head.weight.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    engine = None
    try:
        engine = make_engine(model, vocabulary, served, arm, size, count)
        state = engine.state
        held, answered = hold_and_decode(engine, size, count, width)
        pools = state.prompts.nbytes + state.records.nbytes + state.backend.own_nbytes
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        return {"held": held, "answered": answered, "pool_bytes": pools, "peak_bytes": peak}
    except torch.OutOfMemoryError:
        return None
    finally:
        del engine
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", default="139GiB")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=5120)
    parser.add_argument("--tokens", type=int, nargs="+", default=[7, 3])
    parser.add_argument("--codebook", type=int, default=8192)
    parser.add_argument("--arms", nargs="+", default=["replay", "full_state_copy"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of four small layers, to try the script")
    parser.add_argument("--max-batch-rows", type=int, default=EngineConfig.max_batch_rows)
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(machine(), flush=True)
    device = torch.device(args.device)
    memory = read_memory(args.memory)
    assert memory is not None
    if device.type == "cuda":
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / whole))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(TINY if args.tiny else SHAPE_08B, dtype, device)
    failures = Failures()
    for tokens in args.tokens:
        vocabulary = SidVocabulary.from_token_ids(
            [range(64 + i * args.codebook, 64 + (i + 1) * args.codebook) for i in range(tokens)]
        )
        heads = tokens * args.codebook * model.config.hidden_size * dtype.itemsize
        served = ServedModel(
            model.config.geometry,
            weight_bytes=module_bytes(model, dtype) + heads,
            row_bytes=row_bytes(model.config, dtype),
            num_codes=args.codebook,
            dtype=dtype,
            record_dtype=dtype,
            max_batch_rows=args.max_batch_rows,
        )
        size = RequestSize(
            args.prompt, tuple(min(args.width, args.codebook ** (i + 1)) for i in range(tokens))
        )
        for arm in args.arms:
            label = f"{arm} O={tokens}"
            began = time.perf_counter()
            try:
                fit = max_requests(served, arm, size, memory)
                found = try_arm(model, vocabulary, served, arm, size, fit.num_requests, args.width)
                more = fit.num_requests + max(1, -(-fit.num_requests // 20))
                beyond = None
                if device.type == "cuda":
                    beyond = try_arm(model, vocabulary, served, arm, size, more, args.width)
            except Exception as error:  # the other arms are still worth their time
                failures.add(label, repr(error))
                continue
            report(args, arm, tokens, fit, found, more, beyond, memory)
            print(f"{label}: {time.perf_counter() - began:.1f} s", flush=True)
            if found is None or found["held"] < fit.num_requests or found["answered"] < fit.num_requests:
                failures.add(label, f"{fit.num_requests} requests should fit, found {found}")
            if beyond is not None:
                failures.add(label, f"{more} requests fit too; the answer was {fit.num_requests}")
    failures.exit()


def report(
    args: argparse.Namespace,
    arm: str,
    tokens: int,
    fit: Fit,
    found: dict[str, int] | None,
    more: int,
    beyond: dict[str, int] | None,
    memory: int,
) -> None:
    """Print a line and append the result."""
    case = {"model": "tiny" if args.tiny else "qwen3.5-0.8b", "W": args.width, "prompt": args.prompt}
    case |= {"O": tokens, "memory_gib": round(memory / 2**30, 2)}
    pools = sum(fit.parts[name] for name in ("kv_pages", "recurrent_states", "conv_states", "page_table"))
    pools += fit.parts["records"] + fit.parts["beam_states"]
    append_result(
        "capacity", arm=arm, case=case, metric="requests", unit="requests", value=fit.num_requests,
        parts=fit.parts, pool_bytes=pools, found=found, five_percent_more=more, fit_beyond=beyond,
        out=args.out, commit=args.commit,
    )  # fmt: skip
    text = "did not fit" if found is None else ", ".join(f"{k} {v}" for k, v in found.items())
    print(f"{arm:24s} O={tokens}: {fit.num_requests} requests by formula ({pools} bytes of pools): {text}")
    print(
        f"{'':24s} {more}: {beyond or ('did not fit' if args.device != 'cpu' else 'not tried')}", flush=True
    )


if __name__ == "__main__":
    main()
