"""What a request's exclusions cost: working them out on the host, and choosing under them on the device.

One catalogue of ten million items, each request excludes a thousand of its own. Three times are reported: `compile`,
once per request on the host (`EligibilityIndex.compile`); `acquire`, once per request, its mask on the device; and
`select`, at every step, what a selection takes longer under the requests' masks than without any. `per_step` is their
sum, the first two spread over the steps of a request.

    python bench/filters.py [--items 10000000] [--exclude 1000] [--requests 4] [--width 256]

The catalogue is made on the first run and kept in `build/bench`, from where it is memory-mapped as a server would.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import append_result, time_events
from onela import ItemCatalog, Request, SidVocabulary
from onela.decoding import BeamPool, PackedBeams, Selection
from onela.engine.served import ServedCatalog
from onela.ops.beams.columns import row_size

HOST = torch.device("cpu")
CATALOGUES = Path(__file__).resolve().parent.parent / "build" / "bench"


def make_served(items: int, levels: int, size: int, device: torch.device) -> ServedCatalog:
    """A catalogue of random SIDs, as it is served."""
    folder = CATALOGUES / f"random-{items}-{levels}x{size}"
    if not folder.exists():
        sids = np.random.default_rng(0).integers(0, size, size=(items, levels), dtype=np.int32)
        ItemCatalog.from_arrays(np.arange(items), sids).save(folder)
    starts = [level * size for level in range(levels)]
    vocabulary = SidVocabulary.from_token_ids([list(range(start, start + size)) for start in starts])
    return ServedCatalog.prepare(ItemCatalog.load(folder), vocabulary, device)


def time_host(runs: list[Callable[[], Any]], device: torch.device = HOST) -> list[float]:
    """Milliseconds of each run, with what it leaves to the device."""
    times = []
    for run in runs:
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    return times


def start_beams(
    served: ServedCatalog, level: int, levels: int, requests: int, width: int, device: torch.device
) -> PackedBeams:
    """`width` beams of each request on random nodes before a level, in order."""
    trie = served.search.trie
    assert trie is not None
    N = requests * width
    generator = torch.Generator().manual_seed(level)
    count = int(trie.num_nodes(level)) if level else 1
    nodes = [torch.randperm(count, generator=generator)[:width].sort().values for _ in range(requests)]
    return PackedBeams(
        cum_logprobs=torch.randn(N, generator=generator).to(device),
        trie_nodes=torch.cat(nodes).to(device),
        hidden_rows=torch.arange(N, device=device),
        rows=torch.zeros(N, row_size(levels), dtype=torch.int32, device=device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--exclude", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--codebook", type=int, default=8192)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    served = make_served(arguments.items, arguments.levels, arguments.codebook, device)
    index, masks = served.eligibility, served.masks
    assert index is not None
    assert masks is not None
    chance = np.random.default_rng(1)
    R, W = arguments.requests, arguments.width
    excluded = [
        chance.choice(arguments.items, arguments.exclude, replace=False).tolist() for _ in range(12 * R + 1)
    ]
    index.compile(exclude_item_ids=excluded[-1])  # what all requests share is made once
    compiles = time_host([partial(index.compile, exclude_item_ids=ids) for ids in excluded[:-1]])
    eligible = [
        served.compile(Request(prompt_token_ids=[1], exclude_item_ids=ids)) for ids in excluded[: 4 * R]
    ]
    rows: list[int] = []
    acquires = []
    for compiled in eligible:
        acquires += time_host([lambda compiled=compiled: rows.append(masks.acquire(compiled))], device)
        if len(acquires) <= 3 * R:  # the first ones make room
            masks.release(rows.pop())
    acquires = acquires[R:]
    selects = []
    with torch.inference_mode():
        for level in range(arguments.levels):
            width = W if level else 1
            beams = start_beams(served, level, arguments.levels, R, width, device)
            logits = torch.randn(R * width, arguments.codebook, device=device)
            pool = BeamPool(arguments.levels, device)
            pool.reserve(R * W)
            selection = Selection.of(level, [width] * R, [W] * R, range(0, R * W, W), device, mask_rows=rows)
            times = []
            for allowed in (None, masks.level(level)):
                run = partial(served.search.step, pool, selection, beams, logits, allowed=allowed)
                if device.type == "cuda":
                    times.append(statistics.median(time_events(run, samples=30, per_sample=4)) / 1000)
                else:
                    times.append(statistics.median(time_host([run] * 10, device)))
            selects.append((times[1] - times[0]) / R)
            print(f"level {level}: selection {times[0]:.3f} ms, under masks {times[1]:.3f} ms")
    parts = {"compile": statistics.median(compiles), "acquire": statistics.median(acquires)}
    parts["select"] = statistics.mean(selects)
    per_step = (parts["compile"] + parts["acquire"]) / arguments.levels + parts["select"]
    case = {"items": arguments.items, "exclude": arguments.exclude, "R": R, "W": W, "O": arguments.levels}
    for metric, value in {**parts, "per_step": per_step}.items():
        print(
            f"{metric}: {value:.3f} ms per request"
            + (" and step" if metric in ("select", "per_step") else "")
        )
        append_result(
            "filters", arm="onela", case=case, metric=metric, unit="ms", value=value, out=arguments.out,
            commit=arguments.commit,
        )  # fmt: skip


if __name__ == "__main__":
    main()
