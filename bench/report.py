"""Writes the tables of `docs/measured.md` and `README.md` from the lines in `bench/results`.

A document holds pairs of markers, `<!-- results: BENCH METRIC -->` and `<!-- /results -->`; what stands between
them is made here: a row per case, a column per arm. A later line of the same bench, arm, case, metric and GPU
replaces an earlier one. The first marker may go on: `arms=a,b` and `KEY=VALUE` keep only those arms and cases, and with
`fields=a.b,c.d` the columns are these further fields of the lines, which must have the line's unit.

    python -m bench.report [--check]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import re
from pathlib import Path
from typing import Any

from onela.bench.results import latest_lines

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs/measured.md", "README.md")
MARKERS = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- /results -->)", re.DOTALL)


def read_results(folder: Path = ROOT / "bench" / "results") -> list[dict[str, Any]]:
    """All lines, the last one of each measured case."""
    return latest_lines(path.read_text() for path in sorted(folder.glob("*.jsonl")))


def format_value(row: dict[str, Any]) -> str:
    """A value with its unit, and how far it stands from its floor; its note where there is no value."""
    if row["value"] is None:
        return str(row.get("note", "-"))
    if row["unit"] == "bytes":
        return f"{row['value'] / 2**30:.3g} GiB"
    text = (
        f"{row['value']:.3g} {row['unit']}"
        if abs(row["value"]) < 1000
        else f"{row['value']:.0f} {row['unit']}"
    )
    if row.get("ratio_to_floor"):
        text += f" ({row['ratio_to_floor']:.2f}x floor)"
    return text


def field_row(row: dict[str, Any], field: str) -> dict[str, Any]:
    """A line for one further field of a line, with the end of its path as its arm."""
    value: Any = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return {**row, "arm": " ".join(field.split(".")[-2:]), "value": value, "ratio_to_floor": None}


def make_table(rows: list[dict[str, Any]], spec: str) -> str:
    """The Markdown table for one marker."""
    bench, metric, *filters = spec.split()
    chosen = [row for row in rows if row["bench"] == bench and row["metric"] == metric]
    arms: list[str] | None = None
    fields: list[str] = []
    for item in filters:
        key, _, value = item.partition("=")
        if key == "arms":
            arms = value.split(",")
        elif key == "fields":
            fields = value.split(",")
        else:
            chosen = [row for row in chosen if str(row["case"].get(key)) == value]
    if not chosen:
        return "No line yet.\n"
    if fields:
        chosen = [field_row(row, field) for row in chosen for field in fields]
    seen = list(dict.fromkeys(row["arm"] for row in chosen))
    columns = [arm for arm in arms if arm in seen] if arms else seen
    chosen = [row for row in chosen if row["arm"] in columns]
    shared = set.intersection(*({(k, json.dumps(v)) for k, v in row["case"].items()} for row in chosen))
    keys = [k for k in chosen[0]["case"] if (k, json.dumps(chosen[0]["case"][k])) not in shared]
    keys += [
        k
        for row in chosen
        for k in row["case"]
        if k not in keys and (k, json.dumps(row["case"][k])) not in shared
    ]
    keys = list(dict.fromkeys(keys))
    cases = list(dict.fromkeys(tuple(row["case"].get(k) for k in keys) for row in chosen))
    cells = {(tuple(row["case"].get(k) for k in keys), row["arm"]): format_value(row) for row in chosen}
    lines = ["| " + " | ".join([*keys, *columns]) + " |", "|" + " --- |" * (len(keys) + len(columns))]
    lines += [
        "| "
        + " | ".join(
            [*("-" if v is None else str(v) for v in case), *(cells.get((case, a), "-") for a in columns)]
        )
        + " |"
        for case in cases
    ]
    last = chosen[-1]
    fixed = ", ".join(f"{k} = {json.loads(v)}" for k, v in sorted(shared))
    commits = ", ".join(f"`{c}`" for c in dict.fromkeys(row["commit"] for row in chosen if row["commit"]))
    machine = "two CPU cores" if last["gpu"] == "cpu" else last["gpu"]
    note = f"{machine}, torch {last['torch']}, commit {commits}, {last['date']}"
    command = last["command"].split(" --out")[0]
    return "\n".join([*lines, "", f"{fixed + '; ' if fixed else ''}{note}; `{command}`"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    options = parser.parse_args()
    rows = read_results()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        fresh = MARKERS.sub(lambda match: match[1] + make_table(rows, match[2]) + match[3], text)
        if fresh != text:
            stale.append(name)
            if not options.check:
                path.write_text(fresh)
    if options.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m bench.report")


if __name__ == "__main__":
    main()
