"""Lines of results: one JSON object per measured case, with the machine it was measured on."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

Line = dict[str, Any]


@lru_cache(maxsize=1)
def machine() -> dict[str, str | None]:
    """GPU (or "cpu"), driver and versions, as they stand in every line of results."""
    gpu, driver = "cpu", None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = output_of(query).splitlines()[0] if output_of(query) else None
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__, "triton": version}


def output_of(command: list[str]) -> str:
    """What a command prints; nothing when it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def result_line(
    bench: str,
    *,
    arm: str,
    case: dict[str, Any],
    metric: str,
    unit: str,
    value: float | None,
    spread: Sequence[float] | None = None,
    floor: float | None = None,
    commit: str | None = None,
    command: str,
    **more: Any,
) -> Line:
    """One line.

    Args:
        bench: name of the benchmark.
        arm: what was run.
        case: sizes and options that identify the case.
        metric, unit, value: what was measured; value None: nothing could be, and `note` says why.
        spread: smallest and largest sample.
        floor: the least the value could be on this machine, in the same unit.
        commit: the version that was measured. command: what was typed.
        more: further fields.
    """
    line: Line = {"bench": bench, "arm": arm, "case": case, "metric": metric, "unit": unit, "value": value}
    line["spread"] = None if spread is None else list(spread)
    line["floor"] = floor
    line["ratio_to_floor"] = None if floor is None or value is None else value / floor
    line |= machine()
    line |= {"commit": commit, "date": datetime.date.today().isoformat(), "command": command}
    return line | more


def append_line(path: Path, line: Line) -> None:
    """Append a line to a file, whose directory is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def latest_lines(texts: Iterable[str]) -> list[Line]:
    """The lines of several files, the last one of each bench, arm, case, metric and GPU."""
    latest: dict[str, Line] = {}
    for text in texts:
        for row in map(json.loads, text.splitlines()):
            key = json.dumps([row[k] for k in ("bench", "arm", "case", "metric", "gpu")], sort_keys=True)
            latest.pop(key, None)
            latest[key] = row
    return list(latest.values())
