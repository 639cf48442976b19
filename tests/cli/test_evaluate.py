"""`onela evaluate`, run as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import run
from tests.fixtures import Published, save_hybrid


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), codebook_size=4)


@pytest.fixture
def data(tmp_path: Path, checkpoint: Published) -> Path:
    ids = list(checkpoint.items)
    rows = [{"history": ids[i : i + 3], "target": ids[i + 3]} for i in range(6)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_json(checkpoint: Published, data: Path) -> None:
    options = ["--data", str(data), "--catalog", str(checkpoint.catalog), "--device", "cpu", "--json"]
    widths = ["--beam-width", "4", "--beam-width", "30", "-k", "3"]
    report = json.loads(run("evaluate", str(checkpoint.path), *options, *widths).stdout)
    assert (report["num_examples"], report["ks"]) == (6, [3])
    names = [(one["constrained"], one["beam_width"]) for one in report["runs"]]
    assert names == [(True, 4), (True, 30), (False, 4), (False, 30)]
    assert [one["legal_share"] for one in report["runs"][:2]] == [1.0, 1.0]


def test_table_and_plot(checkpoint: Published, data: Path, tmp_path: Path) -> None:
    plot = tmp_path / "recall.png"
    options = ["--data", str(data), "--catalog", str(checkpoint.catalog), "--device", "cpu", "--limit", "2"]
    out = run("evaluate", str(checkpoint.path), *options, "--beam-width", "8", "--plot", str(plot)).stdout
    for word in ("semantic IDs, 2 examples", "items, 2 examples", "hit rate", "coverage", "legal"):
        assert word in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_catalogue(checkpoint: Published, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "x", "target_sid": "<s_a_0><s_b_1><s_c_2>"}')
    options = ["--data", str(file), "--device", "cpu", "--beam-width", "64", "-k", "64", "--json"]
    report = json.loads(run("evaluate", str(checkpoint.path), *options).stdout)
    assert [(one["constrained"], one["item"]) for one in report["runs"]] == [(False, None)]
    assert report["runs"][0]["sid"]["recall"] == {"64": 1.0}


def test_errors_are_one_line(checkpoint: Published, data: Path) -> None:
    wrong = run("evaluate", str(checkpoint.path), "--data", str(data), "--constraint", "maybe", code=2)
    assert wrong.stderr == "onela: --constraint: 'maybe' is none of on, off, both\n"
    wrong = run("evaluate", str(checkpoint.path), "--data", str(data), "--device", "cpu", code=2)
    assert wrong.stderr.startswith(f"onela: {data}, line 1: history: item ids need a catalogue")
