"""The sweep's shapes, its shards, and what is summed up from the lines."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.common import append_result
from bench.operator_sweep import BASELINES, BENCH, LAUNCH_MS, shard, summarize, sweep


def test_405_shapes_in_any_number_of_shards() -> None:
    cases = sweep()
    assert len(set(cases)) == 405
    parts = [shard(argparse.Namespace(shard=f"{i}/4")) for i in range(4)]
    assert sorted(map(str, cases)) == sorted(str(c) for part in parts for c in part)


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two shapes: gains of 10 and 30 over the copy, and the better of two arms that read the parent."""
    times = {"replay": (1.0, 1.0), "full_state_copy": (10.0, 30.0), "full_state_read_parent": (8.0, 9.0)}
    times |= {"full_state_read_parent_bf16": (6.0, 12.0), "replay_ssm_shared": (5.0, 5.0)}
    for arm in ("replay", *BASELINES):
        for case, value in zip(sweep(), times[arm]):
            append_result(
                BENCH, arm=arm, case=asdict(case), metric="time", unit="ms", value=value, floor=0.5,
                out=tmp_path / "lines.jsonl",
            )  # fmt: skip
    out = tmp_path / "summary" / "lines.jsonl"
    with pytest.raises(SystemExit, match="403 shapes lack an arm"):
        summarize(argparse.Namespace(results=tmp_path, out=out, commit="c"))
    found = {
        (line["metric"], line["case"]["over"]): line for line in map(json.loads, out.read_text().splitlines())
    }
    assert found["median_speedup", "full_state_copy"]["value"] == 20
    assert found["median_speedup", "best full_state_read_parent"]["spread"] == [6, 9]
    assert found["slowest_shape", "floor and 4 us a run"]["value"] == pytest.approx(1 / (0.5 + LAUNCH_MS))
    assert "2 of 405" in capsys.readouterr().out
