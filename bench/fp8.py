"""What linear maps in float8 change in the answers of a trained model: the demo's, on MovieLens-100K.

The demo's checkpoint is loaded in float32, in `--dtype` and with `quantization="fp8"`, and each answers the held-out
users. On a CPU the numbers are those of a GPU: rows and weights are rounded alike, and products of float8 are exact.
Reported are the share of float32's top-k that each has (k of `--tops`), the differences of the scores of common items,
and recall and NDCG.

    python bench/fp8.py [--users 943] [--beams 128]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import append_result
from examples.movielens.checkpoint import load_weights, write_checkpoint
from examples.movielens.data import load_movielens, split
from examples.movielens.demo import request_of
from examples.movielens.evaluate import recall_ndcg
from onela import BeamParams, Engine, Result


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=943)
    parser.add_argument("--beams", type=int, default=128)
    parser.add_argument("--tops", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
