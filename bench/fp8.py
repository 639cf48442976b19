"""What linear maps in float8 change: the answers of a trained model, the demo's on MovieLens-100K, and the speed.

The demo's checkpoint is loaded in float32, in `--dtype` and with `quantization="fp8"`, and each answers the held-out
users. On a CPU the numbers are those of a GPU: rows and weights are rounded alike, and products of float8 are exact.
Reported are the share of float32's top-k that each has (k of `--tops`), the differences of the scores of common items,
and recall and NDCG.

With `--speed`, on a GPU, in bfloat16 and in float8 at Qwen3.5-0.8B's shape: the matrix products of a step alone (the
rounding of their rows part of it), the decode steps of 4 requests of 256 beams, and prefill, each a CUDA graph.

    python bench/fp8.py [--users 943] [--beams 128]
    python bench/fp8.py --speed
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import append_result, time_events, time_graph
from bench.prefill import admitted
from onela import BeamParams, Engine, Result
from onela.bench.decode import measure_steps
from onela.bench.models import SHAPE_08B, TINY, engine_of, matrix_products, random_model, vocabulary_of
from onela.engine.scheduler import PrefillChunk


def top_overlap(left: list[Result], right: list[Result], k: int) -> float:
    """Mean share of the first k items of one that are among the first k of the other."""
    shares = []
    for a, b in zip(left, right):
        first = {item.sid for item in a.items[:k]}
        shares.append(len(first & {item.sid for item in b.items[:k]}) / max(1, len(first)))
    return statistics.mean(shares)


def score_differences(left: list[Result], right: list[Result], k: int) -> list[float]:
    """|difference| of the scores of every item that is among the first k of both."""
    found = []
    for a, b in zip(left, right):
        scores = {item.sid: item.cum_logprob for item in a.items[:k]}
        found += [abs(i.cum_logprob - scores[i.sid]) for i in b.items[:k] if i.sid in scores]
    return found


def report(
    args: argparse.Namespace, arm: str, case: dict[str, Any], metric: str, samples: Sequence[float]
) -> None:
    """Append and print a time, given in microseconds."""
    value = statistics.median(samples) / 1e3
    append_result(
        "fp8", arm=arm, case={"model": args.model, **case}, metric=metric, unit="ms", value=value,
        spread=[min(samples) / 1e3, max(samples) / 1e3], out=args.out, commit=args.commit,
    )  # fmt: skip
    print(f"{arm:9s} {metric:16s} {case}: {value:.3f} ms", flush=True)


@torch.inference_mode()
def measure_speed(args: argparse.Namespace) -> None:
    """Times of one model in bfloat16, then in float8."""
    shape = TINY if args.model == "tiny" else SHAPE_08B
    model = random_model(shape, torch.bfloat16, torch.device("cuda"))
    vocabulary = vocabulary_of(3, 8192 if args.model != "tiny" else 64)
    for arm in ("bfloat16", "fp8"):
        if arm == "fp8":
            model.quantize()
        for rows in (256, 1024, 4096):
            samples = time_graph([matrix_products(model, rows)], samples=7)
            report(args, arm, {"rows": rows}, "matrix_products", samples)
        engine = engine_of(model, vocabulary, "replay", quantization=model.quantization)
        measured = measure_steps(engine, 4, 1024, 256, samples=7)
        steps = [sum(step) for step in zip(*measured.samples)]
        report(args, arm, {"R": 4, "W": 256, "prompt": 1024, "O": 3}, "decode_forward", steps)
        for count, length in ((4, 1024),):
            active = admitted(engine, [length] * count)
            engine.runner.prefill([PrefillChunk(request, 0, length) for request in active])
            graphs = engine.runner.prefill_graphs
            if graphs is None or graphs.latest is None:
                raise RuntimeError(f"prefill was not captured: {graphs and graphs.failure!r}")
            replay = graphs.latest.graph.replay
            report(args, arm, {"prompts": count, "tokens": length}, "prefill", time_events(replay, samples=9))
            for request in active:
                engine.cancel(request)


def measure_answers(args: argparse.Namespace) -> None:
    """The demo's model with and without float8, over the held-out users."""
    from examples.movielens.checkpoint import load_weights, write_checkpoint
    from examples.movielens.data import load_movielens, split
    from examples.movielens.demo import request_of
    from examples.movielens.evaluate import recall_ndcg

    data = load_movielens()
    held = split(data, "test")
    trained = load_weights(data)
    window = trained.recipe.window
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "checkpoint", trained, data)
        variants = {"float32": {"dtype": "float32"}, args.dtype: {"dtype": args.dtype}}
        variants["fp8"] = {"dtype": args.dtype, "quantization": "fp8"}
        answers: dict[str, list[Result]] = {}
        for name, options in variants.items():
            engine = Engine.from_pretrained(
                path, catalog=path / "catalog.jsonl", device=args.device, **options
            )
            requests = [request_of(data, films, window, engine) for films in held.histories[: args.users]]
            params = BeamParams(beam_width=args.beams)
            answers[name] = [
                result
                for at in range(0, len(requests), args.batch)
                for result in engine.generate(requests[at : at + args.batch], params)
            ]
            print(f"{name}: {len(answers[name])} users answered", flush=True)
    index = {item_id: i for i, item_id in enumerate(data.item_ids)}
    case = {"users": len(requests), "beam_width": args.beams, "model": "movielens demo", "dtype": args.dtype}
    for name, results in answers.items():
        films = [[index[i] for item in result.items for i in item.item_ids][:100] for result in results]
        ranked = torch.tensor([row + [-1] * (100 - len(row)) for row in films])
        targets = torch.as_tensor(held.targets)[: len(requests)]
        recall, ndcg = recall_ndcg(ranked, targets)
        for k in args.tops:
            share = top_overlap(answers["float32"], results, k)
            differences = score_differences(answers["float32"], results, k) or [0.0]
            append_result(
                "fp8", arm=name, case=case | {"top": k}, metric="overlap", unit="share", value=share,
                score_difference_mean=statistics.mean(differences), score_difference_max=max(differences),
                score_difference_p99=sorted(differences)[int(0.99 * (len(differences) - 1))],
                recall_at_10=recall, ndcg_at_10=ndcg, out=args.out,
            )  # fmt: skip
            print(
                f"{name:9s} top {k:3d}: {100 * share:5.1f} % of float32's; scores differ by "
                f"{statistics.mean(differences):.4f} in the mean, {max(differences):.4f} at most; "
                f"recall@10 {recall:.4f} NDCG@10 {ndcg:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=943)
    parser.add_argument("--beams", type=int, default=128)
    parser.add_argument("--tops", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--speed", action="store_true", help="time, on a GPU, instead")
    parser.add_argument(
        "--model", choices=["qwen3.5-0.8b", "tiny"], default="qwen3.5-0.8b", help="of --speed"
    )
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.speed:
        measure_speed(args)
        return
    measure_answers(args)


if __name__ == "__main__":
    main()
