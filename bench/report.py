"""Writes the tables of `docs/measured.md` and `README.md` from the lines in `bench/results`.

A document holds pairs of markers, `<!-- results: BENCH METRIC -->` and `<!-- /results -->`; what stands between
them is made here: a row per case, a column per arm. A later line of the same bench, arm, case, metric and GPU
replaces an earlier one. The first marker may go on: `arms=a,b` and `KEY=A,B` keep only those arms and cases, and with
`fields=a.b,c.d` the columns are these further fields of the lines, which must have the line's unit.

Between `<!-- summary -->` and `<!-- /summary -->` stand the rows of `SUMMARY`, with a figure in the place of each
`{BENCH METRIC KEY=VALUE ...}`: the value, or the least and the greatest of all cases that are chosen. `arm=a` keeps
that arm, `field=a.b` takes another field, which has no unit, and a condition with a space stands in quotation marks.

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
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onela.bench.results import latest_lines

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs/measured.md", "README.md")
TABLES = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- /results -->)", re.DOTALL)
SUMMARIES = re.compile(r"(<!-- summary -->\n).*?(<!-- /summary -->)", re.DOTALL)
OPERATOR = "operator time arm=replay R=16 W=512 K=128 record_dtype=bfloat16"
SPEEDUP = "operator_sweep median_speedup"
PEERS = "peers time_per_step R=4 W=256 O=3"
LAYER = "layer_step time field=ratio_to_floor"
PREFILL = "prefill prefill model=qwen3.5-0.8b cached=0"
PROMPT = "attention prompt B=1 L=5000 HQ=16 D=128"
SERVE = "serve latency_p99 arm=onela shape=qwen3.5-0.8b"
CAPACITY = "capacity requests memory_gib=139.0 O=7"
SELECT = "beam_select time C=8192 dtype=float32 children=None normalizer=level"
SUMMARY = (
    ("what", "measured", "published, or a peer"),
    (
        "the operator, all decode calls at R=16 W=512, 3 / 7 tokens",
        f"{{{OPERATOR} O=3}} / {{{OPERATOR} O=7}}",
        "0.212 / 0.990 ms",
    ),
    (
        "a layer's recurrence and reordering in one decode step, R=4 W=256",
        "{crossover time what=operator tree=random R=4 W=256 t=2 arm=replay}",
        f"vLLM, SGLang, FlashInfer and fla: {{{PEERS} state_dtype=float32}} with fp32 states, "
        f"{{{PEERS} state_dtype=bfloat16}} with bf16",
    ),
    (
        "the operator over 405 shapes, median",
        f"{{{SPEEDUP} over=full_state_copy}} full states copied, "
        f"{{{SPEEDUP} 'over=best full_state_read_parent'}} read from the parent, "
        f"{{{SPEEDUP} over=replay_ssm_shared}} ReplaySSM",
        "17.5 to 46.3x",
    ),
    (
        "DRAM traffic of the operator, R=4 W=512, 3 tokens",
        "{dram dram arm=replay R=4 W=512 O=3}",
        "161 MiB",
    ),
    (
        "a Gated DeltaNet layer's step in one launch, over its byte floor",
        f"{{{LAYER} arm=one_launch R=16}} (R=16), {{{LAYER} arm=one_launch R=4}} (R=4)",
        f"two launches: {{{LAYER} arm=pair}}",
    ),
    (
        "prefill of Qwen3.5-0.8B's shape, 4 x 1K / 1 x 5K / 4 x 5K tokens",
        f"{{{PREFILL} prompts=4 tokens=1024}} / {{{PREFILL} prompts=1 tokens=5120}} / "
        f"{{{PREFILL} prompts=4 tokens=5120}}",
        f"its matrix products alone: {{{PREFILL} prompts=4 tokens=1024 field=floor}} / "
        f"{{{PREFILL} prompts=1 tokens=5120 field=floor}} / {{{PREFILL} prompts=4 tokens=5120 field=floor}} ms",
    ),
    (
        "attention of a prompt of 5,000 tokens, 16 query and 8 key heads of 128",
        f"{{{PROMPT} arm=hopper}}",
        f"cuDNN: {{{PROMPT} arm=cudnn}}",
    ),
    (
        "selection over 8,192 codes, R=4 W=256 / R=16 W=512 / R=1 W=5000",
        f"{{{SELECT} arm=kernels R=4 W=256}} / {{{SELECT} arm=kernels R=16 W=512}} / "
        f"{{{SELECT} arm=kernels R=1 W=5000}}",
        f"`log_softmax` and `topk`: {{{SELECT} arm=torch R=4 W=256}} / {{{SELECT} arm=torch R=16 W=512}} / "
        f"{{{SELECT} arm=torch R=1 W=5000}}",
    ),
    (
        "Qwen3.5-0.8B's shape over HTTP, prompts of 1K to 5K: 99th percentile at 60/s / 150/s with 80 % cached",
        f"{{{SERVE} rate=60.0 cached=0.0}} / {{{SERVE} rate=150.0 cached=0.8}}",
        "-",
    ),
    (
        "requests of 256 beams and 7 tokens, prompts of 5K, held in 139 GiB",
        f"{{{CAPACITY} arm=replay}}",
        f"full states: {{{CAPACITY} arm=full_state_copy}}",
    ),
)


def read_results(folder: Path = ROOT / "bench" / "results") -> list[dict[str, Any]]:
    """All lines, the last one of each measured case."""
    return latest_lines(path.read_text() for path in sorted(folder.glob("*.jsonl")))


def format_value(row: dict[str, Any]) -> str:
    """A value with its standard error and unit, and how far it stands from its floor; its note where there is none."""
    if row["value"] is None:
        return str(row.get("note", "-"))
    if row["unit"] == "bytes":
        return f"{row['value'] / 2**30:.3g} GiB"
    text = format_number(row["value"])
    if row.get("standard_error"):
        text += f" ± {row['standard_error']:.1g}"
    text += format_unit(row["unit"])
    if row.get("ratio_to_floor"):
        text += f" ({row['ratio_to_floor']:.2f}x floor)"
    return text


def format_number(value: float) -> str:
    """Three digits, or a whole number where that has more."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def format_unit(unit: str) -> str:
    """What stands behind a number."""
    return unit if unit in ("", "x") else f" {unit}"


def field_of(row: dict[str, Any], field: str) -> Any:
    """What a line holds under a path of names, None if nothing."""
    value: Any = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def field_row(row: dict[str, Any], field: str) -> dict[str, Any]:
    """A line for one further field of a line, with the end of its path as its arm."""
    name = " ".join(field.split(".")[-2:])
    return {**row, "arm": name, "value": field_of(row, field), "ratio_to_floor": None, "standard_error": None}


def make_value(rows: list[dict[str, Any]], spec: str) -> str:
    """One figure of the summary."""
    bench, metric, *filters = shlex.split(spec)
    chosen = [row for row in rows if row["bench"] == bench and row["metric"] == metric]
    field, unit = "value", chosen[0]["unit"] if chosen else ""
    for item in filters:
        key, _, value = item.partition("=")
        if key == "arm":
            chosen = [row for row in chosen if row["arm"] == value]
        elif key == "field":
            field, unit = value, ""
        else:
            chosen = [row for row in chosen if str(row["case"].get(key)) == value]
    values = [value for row in chosen if (value := field_of(row, field)) is not None]
    if not values:
        return "no line yet"
    ends = dict.fromkeys(format_number(value) for value in (min(values), max(values)))
    return " to ".join(ends) + format_unit(unit)


def make_summary(rows: list[dict[str, Any]], summary: Sequence[Sequence[str]]) -> str:
    """A Markdown table of texts with figures in them, its first row the heads."""
    cells = [
        [re.sub(r"{(.*?)}", lambda spec: make_value(rows, spec[1]), c) for c in line] for line in summary
    ]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


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
            chosen = [row for row in chosen if str(row["case"].get(key)) in value.split(",")]
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
    # Numbers in their order; names stay as the lines have them.
    cases.sort(key=lambda case: [v if isinstance(v, (int, float)) else -1 for v in case])
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
    machines = dict.fromkeys("two CPU cores" if row["gpu"] == "cpu" else row["gpu"] for row in chosen)
    torches = dict.fromkeys(row["torch"] for row in chosen)
    note = f"{', '.join(machines)}, torch {', '.join(torches)}, commit {commits}, {last['date']}"
    command = last["command"].split(" --out")[0]
    return "\n".join([*lines, "", f"{fixed + '; ' if fixed else ''}{note}; `{command}`"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a document is out of date"
    )
    options = parser.parse_args()
    rows = read_results()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        fresh = TABLES.sub(lambda match: match[1] + make_table(rows, match[2]) + match[3], text)
        fresh = SUMMARIES.sub(lambda match: match[1] + make_summary(rows, SUMMARY) + match[2], fresh)
        if fresh != text:
            stale.append(name)
            if not options.check:
                path.write_text(fresh)
    if options.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m bench.report")


if __name__ == "__main__":
    main()
