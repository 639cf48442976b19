"""The item benchmark: build, save and map a catalogue of ten million items, and its trie alone.

SIDs are uniform random codes, which is the worst case for the trie: nearly every prefix of two levels is its own. Each
run is a process of its own, so that its peak of resident memory (imports and inputs included) is its own too. What is
loaded is held against what was put in before a time is reported.

    python bench/items.py                        # 10 million items, 3 levels of 8192
    python bench/items.py --items 1000000 --arms files
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import append_result, commit, machine
from onela.items import ItemCatalog, ItemTrie, convert_catalog

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"time": "s", "peak_rss": "GiB", "size": "GiB"}


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def make(items: int, levels: int, codes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.permutation(items), rng.integers(0, codes, (items, levels), dtype=np.int32)


def check(catalog: ItemCatalog, ids: np.ndarray, sids: np.ndarray) -> None:
    """A sample of items must be found, on the SID that they were given."""
    for row in np.random.default_rng(1).integers(0, len(ids), 1000):
        item = catalog.find(int(ids[row]))
        if item is None or catalog.sids([catalog.sid_index_of(item)])[0].tolist() != sids[row].tolist():
            raise SystemExit(f"item {ids[row]} is not where it was put; no time is reported")


def trie(items: int, levels: int, codes: int, folder: Path) -> dict[str, float]:
    """The trie alone."""
    _, sids = make(items, levels, codes)
    build, built = clock(lambda: ItemTrie.from_sids(sids, [codes] * levels))
    save, _ = clock(lambda: built.save(folder / "trie"))
    load, loaded = clock(lambda: ItemTrie.load(folder / "trie"))
    sample = sids[:: max(1, items // 10_000)]
    if not np.array_equal(loaded.sids(loaded.find(sample)), sample):
        raise SystemExit("a SID is not where it was put; no time is reported")
    return {"build time": build, "save time": save, "load time": load, "disk size": built.nbytes / 2**30}


def catalog(items: int, levels: int, codes: int, folder: Path) -> dict[str, float]:
    """Items with integer ids and their trie."""
    ids, sids = make(items, levels, codes)
    build, built = clock(lambda: ItemCatalog.from_arrays(ids, sids))
    save, _ = clock(lambda: built.save(folder / "catalog"))
    load, loaded = clock(lambda: ItemCatalog.load(folder / "catalog"))
    first, _ = clock(lambda: loaded.items_of(int(loaded.lookup(sids[:1])[0])))
    check(loaded, ids, sids)
    size = sum(file.stat().st_size for file in (folder / "catalog").iterdir()) / 2**30
    return {
        "build time": build,
        "save time": save,
        "load time": load,
        "first_lookup time": first,
        "disk size": size,
    }


def files(items: int, levels: int, codes: int, folder: Path) -> dict[str, float]:
    """The same items through JSONL and parquet."""
    ids, sids = make(items, levels, codes)
    ItemCatalog.from_arrays(ids, sids).save(folder / "catalog")
    result = {}
    for name in ("jsonl", "parquet"):
        path = folder / f"items.{name}"
        result[f"{name}_write time"], _ = clock(lambda path=path: convert_catalog(folder / "catalog", path))
        result[f"{name}_read time"], loaded = clock(lambda path=path: ItemCatalog.load(path))
        check(loaded, ids, sids)
    return result


ARMS: dict[str, Callable[[int, int, int, Path], dict[str, float]]] = {
    "trie": trie,
    "catalog": catalog,
    "files": files,
}


def child(arm: str, items: int, levels: int, codes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="onela-items-") as folder:
        result = ARMS[arm](items, levels, codes, Path(folder))
    # Linux counts in KiB.
    result["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--codes", type=int, default=8192)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["trie", "catalog"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.arms[0], options.items, options.levels, options.codes)
        return
    gate = [sys.executable, "-m", "pytest", "-q", "tests/items/test_trie.py", "tests/items/test_catalog.py"]
    if subprocess.run(gate, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("the tests of the trie or the catalogue fail; nothing is timed")
    print(f"{machine()['gpu']}, torch {machine()['torch']}, numpy {np.__version__}, commit {commit()}")
    case = {"items": options.items, "levels": options.levels, "codebook_size": options.codes}
    sizes = ["--items", str(options.items), "--levels", str(options.levels), "--codes", str(options.codes)]
    for arm in options.arms:
        command = [sys.executable, str(Path(__file__)), "--child", "--arms", arm, *sizes]
        runs = []
        for _ in range(options.repeat):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
            runs.append(json.loads(done.stdout))
        for metric in runs[0]:
            values = [run[metric] for run in runs]
            unit = UNITS[metric.split()[-1]]
            low, middle, high = min(values), statistics.median(values), max(values)
            print(f"{arm:8} {metric:36} {middle:10.4g} {unit:4} [{low:.4g}, {high:.4g}]")
            append_result(
                "items",
                arm=arm,
                case=case,
                metric=metric.replace(" ", "_"),
                unit=unit,
                value=middle,
                spread=(low, high),
                out=options.out,
            )


if __name__ == "__main__":
    main()
