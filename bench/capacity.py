"""Whether the answer of `onela capacity` is true: as many requests as fit are held and answered, 5 % more are not.

A model of Qwen3.5-0.8B's shape gets an engine whose limits are those of the answer, its pools allocated at the start,
and one request more than that. All prompts are run before the first decode step, so that all requests are held at once,
and the one that is too many is left waiting; then they are answered, and the first one's items are held against those
of an engine that has it alone. Where the memory has gone is read off the allocator: weights, pools, captured forwards,
the rest of what it took, and what the process holds beside it (CUDA's context, the kernels' code). Then the same is
tried with 5 % more requests, which must end in `OutOfMemoryError`. On a GPU the memory of the process is cut to
`--memory`.

    python bench/capacity.py [--memory 139GiB] [--tokens 7] [--arms replay full_state_copy]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import Failures, append_result, machine
from onela import BeamParams, Engine, EngineConfig, Request, Result, SidVocabulary
from onela.bench.decode import choose
from onela.bench.models import SHAPE_08B, TINY, engine_of, overlap, random_model, vocabulary_of
from onela.cli.capacity import read_memory
from onela.engine.active import ActiveRequest
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
        max_tokens_beside_decode=None,
        preallocate=True,
        **dict(VARIANTS)[arm],
    )
    engine = Engine(model, vocabulary, config=config)
    engine.state.backend.reserve(count * size.num_rows, len(size.widths) - 1)
    # Spare slots for full forwards first: then no request's extent has to lie around them.
    engine.state.records.admit(0, spare_slots(served, size, count))
    return engine


def hold_and_decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: BeamParams
) -> tuple[int, int, list[ActiveRequest]]:
    """Hold as many requests as there is room for, then decode those; the others are cancelled.

    Returns:
        The most that were held at a time, how many had to wait then, and those that were held.
    Raises:
        OutOfMemoryError: a request failed, or a forward could not be captured: there was no room.
    """
    active = [engine.prepare(Request(prompt_token_ids=row), params) for row in prompts]
    for request in active:
        engine.scheduler.add(request)
    with torch.inference_mode():
        while True:
            # A step of the engine, but for the decodes, which would let the first go before the last have come.
            batch = Batch(prefill=engine.scheduler.schedule().prefill)
            if not batch.prefill:
                break
            engine.runner.prefill(batch.prefill)
            choose(engine, batch)
            engine.finish(batch)
        held, waiting = len(engine.scheduler.running), list(engine.scheduler.waiting)
        for request in waiting:
            engine.cancel(request)
        while engine.scheduler.has_work:
            engine.step()
    kept = [request for request in active if not any(request is other for other in waiting)]
    graphs = [engine.runner.graphs, engine.runner.selection_graphs, engine.runner.prefill_graphs]
    lost = [request.outcome for request in kept if not isinstance(request.outcome, Result)]
    lost += [graph.failure for graph in graphs if graph is not None and graph.failure is not None]
    if lost:
        raise torch.OutOfMemoryError(f"a request or a capture failed: {lost[0]}")
    return held, len(waiting), kept


def device_memory(weights: int, pools: int) -> dict[str, int]:
    """Bytes of a GPU by what they are for, at this moment: `weights` and `pools` as given, the rest as it is found.

    `captured` are the private pools of captured forwards, `launched` all else that the allocator holds (forwards that
    are launched kernel by kernel, selections, workspaces), `beside` what is taken without it.
    """
    segments = torch.cuda.memory_snapshot()
    captured = sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) != (0, 0))
    reserved = torch.cuda.memory_reserved()
    free, whole = torch.cuda.mem_get_info()
    return {
        "weights": weights,
        "pools": pools,
        "captured": captured,
        "launched": reserved - captured - weights - pools,
        "beside": whole - free - reserved,
        "free": free,
    }


def try_arm(
    model: CausalLM,
    vocabulary: SidVocabulary,
    served: ServedModel,
    arm: str,
    size: RequestSize,
    count: int,
    params: BeamParams,
) -> dict[str, Any] | None:
    """What was held and answered by an engine with room for `count`, and where the memory went; None: there was none.

    `alone` is the share of the first request's items that it has in an engine of its own.
    """
    cuda = model.lm_head.weight.is_cuda
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(0, 64, (count + 1, size.prompt_tokens), generator=generator).tolist()
    engine = None
    began = time.perf_counter()
    try:
        engine = engine_of(model, vocabulary, arm, cuda_graphs=False)
        [expected] = engine.generate([Request(prompt_token_ids=prompts[0])], params)
        engine = None
        forget(cuda)
        began = time.perf_counter()
        engine = make_engine(model, vocabulary, served, arm, size, count)
        state = engine.state
        held, waiting, answered = hold_and_decode(engine, prompts, params)
        pools = state.prompts.nbytes + state.records.nbytes + state.backend.own_nbytes
        first = answered[0].outcome
        assert isinstance(first, Result)
        found: dict[str, Any] = {
            "held": held,
            "refused": waiting,
            "answered": len(answered),
            "pool_bytes": pools,
        }
        found["alone"] = round(overlap([expected], [first])[0], 4)
        if cuda:
            found["memory"] = device_memory(served.weight_bytes, pools)
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["seconds"] = round(time.perf_counter() - began, 2)
        return found
    except torch.OutOfMemoryError as error:
        print(f"{arm}: {count}: {str(error).splitlines()[0][:160]}", flush=True)
        return None
    finally:
        del engine
        forget(cuda)


def forget(cuda: bool) -> None:
    """Give memory back: captured forwards and their engine hold each other."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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
    params = BeamParams(beam_width=args.width)
    failures = Failures()
    tried: list[tuple[int, str, ServedModel, RequestSize, Fit]] = []
    found: list[dict[str, Any] | None] = []
    # What must not fit comes last: a capture that runs out of memory half-way leaves torch's state behind.
    for tokens in args.tokens:
        vocabulary = vocabulary_of(tokens, args.codebook)
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
            fit = max_requests(served, arm, size, memory)
            try:
                held = try_arm(model, vocabulary, served, arm, size, fit.num_requests, params)
            except Exception as error:  # the other arms are still worth their time
                failures.add(f"{arm} O={tokens}", repr(error))
                continue
            tried.append((tokens, arm, served, size, fit))
            found.append(held)
            print(f"{arm} O={tokens}: {fit.num_requests} by formula: {held or 'did not fit'}", flush=True)
            if (
                held is None
                or not held["held"] == held["answered"] == fit.num_requests
                or held["refused"] != 1
            ):
                failures.add(
                    f"{arm} O={tokens}", f"{fit.num_requests} should fit and one more not, found {held}"
                )
    for (tokens, arm, served, size, fit), held in zip(tried, found):
        more = fit.num_requests + max(1, -(-fit.num_requests // 20))
        beyond = None
        if device.type == "cuda":
            vocabulary = vocabulary_of(tokens, args.codebook)
            try:
                beyond = try_arm(model, vocabulary, served, arm, size, more, params)
            except Exception as error:  # the line of what fitted is still worth writing
                failures.add(f"{arm} O={tokens}, {more} requests", repr(error))
        report(args, arm, tokens, fit, held, more, beyond, memory)
        if beyond is not None:
            failures.add(f"{arm} O={tokens}", f"{more} requests fit too; the answer was {fit.num_requests}")
    failures.exit()


def report(
    args: argparse.Namespace,
    arm: str,
    tokens: int,
    fit: Fit,
    found: dict[str, Any] | None,
    more: int,
    beyond: dict[str, Any] | None,
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
    tried = "not tried" if args.device == "cpu" else beyond or "did not fit"
    print(f"{arm} O={tokens}: {pools} bytes of pools by formula; {more} requests: {tried}", flush=True)


if __name__ == "__main__":
    main()
