"""What every benchmark shares: the machine it ran on, timing by CUDA graphs, and lines of results."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@lru_cache(maxsize=1)
def machine() -> dict[str, str | None]:
    """GPU (or "cpu"), driver and versions, as they stand in every line of results."""
    gpu, driver = "cpu", None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = _output(query).splitlines()[0] if _output(query) else None
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__, "triton": version}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str | None:
    """The commit that is measured, with a `+` when files differ from it; None outside a checkout."""
    here = str(Path(__file__).parent)
    head = _output(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    dirty = _output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return head + ("+" if dirty else "") if head else None


def command() -> str:
    """The command line from the project's root, without the options that say where the line goes and its name."""
    script = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parent.parent
    kept = [str(script.relative_to(root)) if script.is_relative_to(root) else script.name]
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--out", "--commit"):
            next(words, None)
        else:
            kept.append(word)
    return "python " + shlex.join(kept)


def append_result(
    bench: str,
    *,
    arm: str,
    case: dict[str, Any],
    metric: str,
    unit: str,
    value: float,
    spread: Sequence[float] | None = None,
    floor: float | None = None,
    out: Path | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Append one JSON line to `bench/results/<bench>.jsonl` (or to `out`) and return it.

    Args:
        bench: name of the benchmark.
        arm: what was run.
        case: sizes and options that identify the case.
        metric, unit, value: what was measured.
        spread: smallest and largest sample.
        floor: the least the value could be on this machine, in the same unit.
        more: further fields; `commit` overrides the checkout's.
    """
    line: dict[str, Any] = {
        "bench": bench,
        "arm": arm,
        "case": case,
        "metric": metric,
        "unit": unit,
        "value": value,
    }
    line["spread"] = None if spread is None else list(spread)
    line["floor"] = floor
    line["ratio_to_floor"] = None if floor is None else value / floor
    line |= machine()
    line["commit"] = more.pop("commit", None) or commit()
    line["date"] = datetime.date.today().isoformat()
    line["command"] = command()
    line |= more
    path = out or RESULTS / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def copy_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = time_events(lambda: target.copy_(source), samples=10, per_sample=1)
    return 2 * num_bytes / (statistics.median(times) * 1e-6)


def time_events(
    run: Callable[[], Any], *, samples: int = 20, per_sample: int = 1, warm: int = 3
) -> list[float]:
    """Microseconds of one run, per sample; a sample is `per_sample` runs between two events."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(per_sample):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / per_sample)
    return times


def time_graph(
    calls: Sequence[Callable[[], Any]], *, samples: int = 20, target_us: float = 3000
) -> list[float]:
    """Microseconds of running all calls once, captured together in one CUDA graph and replayed back to back."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    graph.replay()
    once = statistics.median(time_events(graph.replay, samples=3))
    times = time_events(graph.replay, samples=samples, per_sample=max(1, int(target_us / max(once, 1.0))))
    del kept
    return times
