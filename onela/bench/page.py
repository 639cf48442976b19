"""One HTML page from lines of results: figures, tables and the lines themselves, with nothing to load beside it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from onela.bench.figures import LABELS, arms_of, chosen, shape_of
from onela.bench.results import Line

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .86rem; } caption { text-align: left; color: #555; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
.best { color: #0b6e4f; font-weight: 600; } .lost { color: #a33; } code { background: #f4f2ef; padding: .1rem .3rem; }
"""

SECTIONS = (
    (
        "operator",
        "The operator, by shape",
        "All decode steps of one recurrent layer: reordering and the recurrence.",
    ),
    (
        "decode",
        "Decode forwards of the whole model",
        "The sum over the decode steps; only the backend differs.",
    ),
    ("parts", "Where the time of a step goes", "Kernels of all decode steps, by what they are for."),
    (
        "memory",
        "Memory by beam width",
        "What one request takes in the pools, by formula; weights and workspace apart.",
    ),
    (
        "crossover",
        "Where replay stops paying",
        "One step of a recurrent layer: what replay reads grows with the tokens that a beam has written, a state does "
        "not grow.",
    ),
)


def make_page(lines: Sequence[Line], figures: dict[str, str], *, title: str, lost: Sequence[str] = ()) -> str:
    """The page.

    Args:
        lines: of `onela.bench.suite`. figures: SVG by name, of `onela.bench.figures`; none: tables alone.
        title: what was measured. lost: cases without a result, and why.
    """
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{_machine(lines)}</p>"]
    if lost:
        rows = "".join(f"<li>{html.escape(what)}</li>" for what in lost)
        body.append(f'<h2 class="lost">Without a result</h2><ul class="lost">{rows}</ul>')
    for name, heading, text in SECTIONS:
        table = TABLES[name](lines)
        if not table and name not in figures:
            continue
        body += [f"<h2>{heading}</h2>", f"<p>{text}</p>", figures.get(name, ""), table]
    # Nothing in the text may end the element.
    data = json.dumps(list(lines)).replace("</", "<\\/")
    body.append(f'<script type="application/json" id="results">{data}</script>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _machine(lines: Sequence[Line]) -> str:
    if not lines:
        return "Nothing was measured."
    last = lines[-1]
    versions = ", ".join(f"{name} {last[name]}" for name in ("driver", "torch", "triton") if last.get(name))
    gpu = "CPU" if last["gpu"] == "cpu" else last["gpu"]
    where = html.escape(f"{gpu}, {versions}, {last['date']}")
    return f"{where}; <code>{html.escape(last['command'])}</code>"


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text, or HTML that was made here."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _by_case(lines: Sequence[Line], name: Any, cell: Any, caption: str) -> str:
    """A row per case, a column per arm."""
    arms = arms_of(lines)
    cases = list(dict.fromkeys(map(name, lines)))
    found = {(name(row), row["arm"]): row for row in lines}
    rows = []
    for case in cases:
        present = [found[case, arm]["value"] for arm in arms if (case, arm) in found]
        cells = []
        for arm in arms:
            row = found.get((case, arm))
            text = "-" if row is None else html.escape(cell(row))
            best = row is not None and row["value"] == min(present)
            cells.append(f'<span class="best">{text}</span>' if best else text)
        rows.append([html.escape(str(case)), *cells])
    return _table(caption, ["", *(LABELS.get(arm, arm) for arm in arms)], rows)


def _milliseconds(row: Line) -> str:
    floor = f" ({row['ratio_to_floor']:.2f}x products)" if row.get("ratio_to_floor") else ""
    return f"{row['value']:.3g} ms{floor}"


def _mebibytes(row: Line) -> str:
    return f"{row['value'] / 2**20:.4g} MiB"


def _operator(lines: Sequence[Line]) -> str:
    return _by_case(
        chosen(lines, "operator", "time"), shape_of, _milliseconds, "ms a layer, all decode steps"
    )


def _decode(lines: Sequence[Line]) -> str:
    times = _by_case(
        chosen(lines, "decode", "decode_forward"),
        shape_of,
        _milliseconds,
        "ms; in brackets, over the matrix products of the steps alone",
    )
    held = _by_case(
        chosen(lines, "decode", "state"), shape_of, _mebibytes, "everything held beside the weights"
    )
    return times + held


def _parts(lines: Sequence[Line]) -> str:
    rows = chosen(lines, "decode", "part_time")
    return _by_case(
        rows,
        lambda row: f"{shape_of(row)}: {row['case']['part'].replace('_', ' ')}",
        _milliseconds,
        "ms, all decode steps",
    )


def _memory(lines: Sequence[Line]) -> str:
    def width(row: Line) -> str:
        return f"W={row['case']['W']} O={row['case']['O']} prompt {row['case']['prompt']}"

    each = _by_case(chosen(lines, "capacity", "request_bytes"), width, _mebibytes, "one request more")
    fits = chosen(lines, "capacity", "requests")
    arms = arms_of(fits)
    found = {(width(row), row["arm"]): f"{row['value']}" for row in fits}
    rows = [
        [case, *(found.get((case, arm), "-") for arm in arms)] for case in dict.fromkeys(map(width, fits))
    ]
    memory = f"requests that fit into {fits[0]['case']['memory_gib']} GiB" if fits else ""
    return each + _table(memory, ["", *(LABELS.get(arm, arm) for arm in arms)], rows)


def _crossover(lines: Sequence[Line]) -> str:
    rows = chosen(lines, "crossover", "time")
    table = _by_case(
        rows, lambda row: f"{row['case']['t'] + 1} tokens", lambda row: f"{row['value']:.1f} us", "one step"
    )
    return table + "".join(f"<p>{html.escape(text)}</p>" for text in crossings(rows))


def crossings(rows: Sequence[Line]) -> list[str]:
    """For every other arm, from how many written tokens on one of its steps takes no longer than replay's."""
    times = {(row["arm"], row["case"]["t"]): row["value"] for row in rows}
    depths = sorted({depth for _, depth in times})
    texts = []
    for arm in arms_of(rows):
        both = [t for t in depths if (arm, t) in times and ("replay", t) in times]
        if arm == "replay" or not both:
            continue
        # From there on at every depth, so that noise at one depth is no crossing.
        slower = [t for t in both if times["replay", t] < times[arm, t]]
        later = [t for t in both if not slower or t > slower[-1]]
        name = LABELS.get(arm, arm)
        if later:
            texts.append(f"A step of {name} takes no longer than one of OneLA from {later[0] + 1} tokens on.")
        else:
            texts.append(f"A step of {name} takes longer than one of OneLA up to {both[-1] + 1} tokens.")
    return texts


TABLES = {
    "operator": _operator,
    "decode": _decode,
    "parts": _parts,
    "memory": _memory,
    "crossover": _crossover,
}
