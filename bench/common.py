"""What the project's benchmarks share: the commit, the command, and where their lines of results go."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onela.bench.results import Line, append_line, machine, output_of, result_line
from onela.bench.timing import copy_bandwidth, time_events, time_graph

RESULTS = Path(__file__).parent / "results"

__all__ = [
    "RESULTS",
    "Failures",
    "append_result",
    "command",
    "commit",
    "copy_bandwidth",
    "machine",
    "time_events",
    "time_graph",
]


def commit() -> str | None:
    """The commit that is measured, with a `+` when files differ from it (results apart); None outside a checkout."""
    here = str(Path(__file__).parent)
    head = output_of(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    code = [":(top)", ":(top,exclude)bench/results"]
    dirty = output_of(["git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", *code])
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
    value: float | None,
    spread: Sequence[float] | None = None,
    floor: float | None = None,
    out: Path | None = None,
    **more: Any,
) -> Line:
    """Append one JSON line to `bench/results/<bench>.jsonl` (or to `out`) and return it.

    Args: as in `onela.bench.results.result_line`; `commit` overrides the checkout's.
    """
    more["commit"] = more.pop("commit", None) or commit()
    more.setdefault("command", command())
    line = result_line(
        bench,
        arm=arm,
        case=case,
        metric=metric,
        unit=unit,
        value=value,
        spread=spread,
        floor=floor,
        **more,
    )
    append_line(out or RESULTS / f"{bench}.jsonl", line)
    return line


class Failures:
    """Arms and cases that were lost on the way: said when it happens, and in the exit code at the end."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def add(self, what: str, why: object) -> None:
        """Note that `what` has no result; the others are still worth their time."""
        self.lost.append(what)
        print(f"FAILED {what}: {why}"[:500], flush=True)

    def exit(self) -> None:
        """Leave with exit code 1 if anything was lost. Raises `SystemExit`."""
        if self.lost:
            sys.exit(f"{len(self.lost)} without a result: {'; '.join(self.lost)}"[:2000])
