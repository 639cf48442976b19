"""Tables made from lines of results."""

from __future__ import annotations

from typing import Any

from bench.report import make_summary, make_table


def line(rate: int, p50: float, p99: float, arm: str = "onela") -> dict[str, Any]:
    row: dict[str, Any] = {
        "bench": "serve",
        "metric": "latency_p99",
        "arm": arm,
        "case": {"W": 256, "rate": rate},
    }
    row |= {"value": p99, "unit": "ms", "gpu": "a GPU", "torch": "2", "commit": "abc", "date": "today"}
    return row | {"command": "python bench", "stages": {"latency": {"p50": p50, "p99": p99}}}


def test_a_row_per_case_and_a_column_per_arm() -> None:
    rows = [line(60, 20, 55.5), line(90, 30, 99), line(60, 40, 1234.5, "other")]
    assert make_table(rows, "serve latency_p99").splitlines() == [
        "| rate | onela | other |",
        "| --- | --- | --- |",
        "| 60 | 55.5 ms | 1234 ms |",
        "| 90 | 99 ms | - |",
        "",
        "W = 256; a GPU, torch 2, commit `abc`, today; `python bench`",
    ]
    some = make_table([*rows, line(120, 1, 2)], "serve latency_p99 rate=60,120").splitlines()
    assert some[2:4] == ["| 60 | 55.5 ms | 1234 ms |", "| 120 | 2 ms | - |"]
    assert make_table(rows, "serve latency_p99 rate=7") == "No line yet.\n"
    wide = make_table([line(60, 20, 94.17) | {"standard_error": 0.283}], "serve latency_p99")
    assert wide.splitlines()[2] == "| 94.2 ± 0.3 ms |"


def test_columns_may_be_other_fields_of_the_lines() -> None:
    table = make_table(
        [line(60, 20, 55.5), line(90, 30, 99)], "serve latency_p99 fields=stages.latency.p50,stages.queue.p50"
    )
    assert table.splitlines()[:4] == [
        "| rate | latency p50 | queue p50 |",
        "| --- | --- | --- |",
        "| 60 | 20 ms | - |",
        "| 90 | 30 ms | - |",
    ]


def test_a_summary_has_a_figure_for_each_condition() -> None:
    rows = [line(60, 20, 55.5), line(90, 30, 99), line(60, 40, 1234.5, "other"), line(90, 1, 2, "a b")]
    spec = "serve latency_p99"
    summary = [
        ("what", "how long"),
        ("one", f"{{{spec} arm=other}}, p50 {{{spec} arm=other field=stages.latency.p50}}"),
        ("two", f"{{{spec} arm=onela}} / {{{spec} 'arm=a b' W=256}} / {{{spec} rate=7}} / {{serve nothing}}"),
    ]
    assert make_summary(rows, summary).splitlines() == [
        "| what | how long |",
        "| --- | --- |",
        "| one | 1234 ms, p50 40 |",
        "| two | 55.5 to 99 ms / 2 ms / no line yet / no line yet |",
    ]
