"""The demo: OneLA recommends films to the users of MovieLens-100K, beside strong baselines and with every backend.

The trained weights become a Hugging Face directory, OneLA serves it with 128 beams, and films a user has seen are
excluded while the beams grow. Everything lands in `build/demo`; a second run reuses the figures that take long.

    python -m examples.movielens.demo [--fresh]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

import onela
from onela.engine.verify import VARIANTS

from . import baselines
from .checkpoint import WEIGHTS, load_weights, write_checkpoint
from .data import MovieLens, Split, load_movielens, split
from .evaluate import recall_ndcg

BUILD = Path("build") / "demo"
BEAMS = 128
TOP = 10
SHOWN_USERS = 5
COMPARED_USERS = 48
BATCH = 16
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="directory for everything that is made")
    parser.add_argument("--fresh", action="store_true", help="reuse nothing of an earlier run")
    options = parser.parse_args()
    build: Path = options.build
    build.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    # Its bars for the one small file of weights would stand between ours.
    transformers.logging.disable_progress_bar()

    data = load_movielens()
    held = split(data, "test")
    fingerprint = fingerprint_of(data)
    cached = {} if options.fresh else read_cache(build / "cache.json", fingerprint)
    checkpoint = build / "checkpoint"
    trained = load_weights(data)
    if not cached or not (checkpoint / "model.safetensors").exists():
        write_checkpoint(checkpoint, trained, data, BEAMS)
    window = trained.recipe.window
    engine = onela.Engine.from_pretrained(checkpoint, catalog=checkpoint / "catalog.jsonl", device="cpu")

    users = shown_users(held)
    recommendations = show_users(engine, data, held, users, window)
    quality = cached.get("quality") or measure_quality(engine, data, held, window)
    print_quality(quality)
    backends = cached.get("backends") or compare_backends(engine, data, held, window)
    print_backends(backends)

    (build / "cache.json").write_text(
        json.dumps({"fingerprint": fingerprint, "quality": quality, "backends": backends})
    )
    report = {
        "onela": onela.__version__,
        "data": {"users": len(held.histories), "films": data.num_items},
        "model": {"parameters": sum(p.numel() for p in engine.model.parameters()), **trained.figures},
        "beam_width": BEAMS,
        "recommendations": recommendations,
        "quality": quality,
        "backends": backends,
        "reused": sorted(cached),
    }
    (build / "report.json").write_text(
        json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    reused = " (quality and backends reused from the run before; --fresh measures again)" if cached else ""
    console.print(f"The same figures stand in {build / 'report.json'}{reused}.")
    console.print(
        f"The checkpoint and its catalogue are in {checkpoint}: README.md says what to try on them."
    )


def request_of(data: MovieLens, history: list[int], window: int, engine: onela.Engine) -> onela.Request:
    """A user's prompt: the last films watched, as text; none of the films seen may come back."""
    catalog = engine.catalog
    assert catalog is not None
    sids = catalog.sids(
        [catalog.sid_index_of(_row(engine, data.item_ids[film])) for film in history[-window:]]
    )
    words = "".join(engine.vocabulary.format_sid(sid) for sid in sids.tolist())
    return onela.Request(prompt=f"<bos>{words}", exclude_item_ids=[data.item_ids[film] for film in history])


def _row(engine: onela.Engine, item_id: str) -> int:
    assert engine.catalog is not None
    row = engine.catalog.find(item_id)
    assert row is not None, f"film {item_id} is not in the catalogue"
    return row


def shown_users(held: Split) -> list[int]:
    """Users with a history to look at, spread over the data set."""
    long_enough = [user for user, films in enumerate(held.histories) if 20 <= len(films) <= 200]
    step = len(long_enough) // SHOWN_USERS
    return long_enough[step // 2 :: step][:SHOWN_USERS]


def show_users(
    engine: onela.Engine, data: MovieLens, held: Split, users: list[int], window: int
) -> list[dict[str, Any]]:
    """Print the last films watched and the ten recommended; `(next!)` marks the film that was watched next."""
    requests = [request_of(data, held.histories[user], window, engine) for user in users]
    results = engine.generate(requests, onela.BeamParams(beam_width=BEAMS, num_return_sequences=TOP))
    report = []
    for user, result in zip(users, results):
        last = [data.titles[film] for film in held.histories[user][-5:]]
        target = data.titles[int(held.targets[user])]
        table = Table(title=f"User {data.user_ids[user]}", title_justify="left")
        table.add_column("last watched, latest first", no_wrap=True, max_width=29)
        table.add_column("recommended", no_wrap=True, max_width=36)
        table.add_column("score", justify="right", no_wrap=True)
        for place in range(TOP):
            item = result.items[place]
            mark = "(next!) " if item.title == target else ""
            seen = last[-1 - place] if place < len(last) else ""
            table.add_row(seen, f"{mark}{item.title}", f"{item.cum_logprob:.2f}")
        console.print(table)
        report.append(
            {
                "user": data.user_ids[user],
                "last_watched": last,
                "watched_next": target,
                "recommended": [
                    {"item_id": item.item_id, "title": item.title, "cum_logprob": item.cum_logprob}
                    for item in result.items
                ],
            }
        )
    return report


def ranked_by(
    engine: onela.Engine, data: MovieLens, held: Split, users: list[int], window: int, label: str
) -> tuple[list[list[int]], float]:
    """The ten films recommended to each user, and the seconds it took."""
    place = {item_id: film for film, item_id in enumerate(data.item_ids)}
    params = onela.BeamParams(beam_width=BEAMS, num_return_sequences=TOP)
    requests = [request_of(data, held.histories[user], window, engine) for user in users]
    ranked = []
    start = time.perf_counter()
    for at in track(range(0, len(users), BATCH), label, console=console):
        for result in engine.generate(requests[at : at + BATCH], params):
            films = [place[str(item.item_id)] for item in result.items]
            ranked.append(films + [-1] * (TOP - len(films)))
    return ranked, time.perf_counter() - start


def measure_quality(engine: onela.Engine, data: MovieLens, held: Split, window: int) -> list[dict[str, Any]]:
    """Recall and NDCG of the first ten over all users, beside baselines weak and strong."""
    lists: dict[str, Any] = {
        "popularity": baselines.popularity(held),
        "item-kNN, whole history": baselines.item_knn(held),
        "second-order Markov": baselines.markov(held),
        "item-kNN, last three films": baselines.item_knn(held, last=3),
        "neighbours in time (the model's teacher)": baselines.cooccurrence(held),
    }
    users = list(range(len(held.histories)))
    name = f"OneLA, {BEAMS} beams"
    lists[name], seconds = ranked_by(engine, data, held, users, window, f"Recommending to {len(users)} users")
    report = []
    for recommender, ranked in lists.items():
        recall, ndcg = recall_ndcg(ranked, held.targets)
        report.append({"recommender": recommender, "recall@10": round(recall, 4), "ndcg@10": round(ndcg, 4)})
    report[-1]["seconds"] = round(seconds, 2)
    return report


def print_quality(quality: list[dict[str, Any]]) -> None:
    table = Table(
        title="Last film of every user held out, seen films excluded, full ranking", title_justify="left"
    )
    for column, side in (("recommender", "left"), ("Recall@10", "right"), ("NDCG@10", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for line in quality:
        cells = [line["recommender"], f"{line['recall@10']:.3f}", f"{line['ndcg@10']:.3f}"]
        table.add_row(*cells, style="bold" if line is quality[-1] else None)
    console.print(table)


def compare_backends(engine: onela.Engine, data: MovieLens, held: Split, window: int) -> list[dict[str, Any]]:
    """Every backend over the same requests: same lists, time, state memory."""
    users = list(range(0, len(held.histories), len(held.histories) // COMPARED_USERS))[:COMPARED_USERS]
    report: list[dict[str, Any]] = []
    expected: list[list[int]] | None = None
    for name, options in VARIANTS:
        variant = onela.Engine(
            engine.model,
            engine.vocabulary,
            engine.catalog,
            config=onela.EngineConfig(device="cpu", **options),
            tokenizer=engine.tokenizer,
        )
        ranked, seconds = ranked_by(variant, data, held, users, window, name)
        expected = expected or ranked
        same = sum(a == b for a, b in zip(expected, ranked))
        report.append(
            {
                "backend": name,
                "users": len(users),
                "same_lists": same,
                "seconds": round(seconds, 3),
                "beam_state_bytes": variant.state.backend.nbytes,
            }
        )
    return report


def print_backends(backends: list[dict[str, Any]]) -> None:
    count = backends[0]["users"]
    title = f"Every backend over {count} users, {BATCH} at a time, {BEAMS} beams"
    table = Table(title=title, title_justify="left")
    for column in ("backend", "same lists", "seconds", "beam state, MiB"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    for line in backends:
        memory = f"{line['beam_state_bytes'] / 2**20:.1f}"
        table.add_row(line["backend"], f"{line['same_lists']}/{count}", f"{line['seconds']:.2f}", memory)
    console.print(table)


def fingerprint_of(data: MovieLens) -> str:
    """Changes with the weights, the data and the code of the package and of this example."""
    digest = hashlib.sha256()
    files = [*sorted(WEIGHTS.iterdir())]
    for root in (Path(onela.__file__).parent, Path(__file__).parent):
        files += sorted(root.rglob("*.py"))
    for file in files:
        digest.update(file.read_bytes())
    digest.update(json.dumps([data.item_ids, data.events]).encode())
    return digest.hexdigest()


def read_cache(path: Path, fingerprint: str) -> dict[str, Any]:
    """What an earlier run over the same weights, data and code measured."""
    try:
        cached = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(cached, dict) or cached.get("fingerprint") != fingerprint:
        return {}
    return {name: cached[name] for name in ("quality", "backends") if name in cached}


if __name__ == "__main__":
    main()
