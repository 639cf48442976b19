"""`onela bench` on a CPU: every part runs, the page holds what was measured, and what is lost is said."""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.decode import parse_shape
from onela.bench import figures, page, suite
from onela.bench.models import TINY
from onela.bench.results import Line, latest_lines
from onela.cli.bench import choose_suite
from onela.errors import ConfigError, OneLAError, UnavailableError
from tests.checkpoints import save_qwen3_5
from tests.cli.test_cli import run

ARMS = ["--arms", "replay", "--arms", "full_state_copy"]


class Page(HTMLParser):
    """Tags that are opened and closed in order, and everything that would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [
            value or ""
            for name, value in attrs
            if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def lines_of(path: Path) -> list[Line]:
    return latest_lines([(path / "results.jsonl").read_text()])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("bench") / "report"
    done = run("bench", "--device", "cpu", *ARMS, "--out", str(out))
    assert f"{out / 'report.html'}" in done.stdout
    return out


def test_every_part_is_measured(measured: Path) -> None:
    lines = lines_of(measured)
    found = {(line["bench"], line["metric"], line["arm"]) for line in lines}
    for arm in ("replay", "full_state_copy"):
        assert ("operator", "time", arm) in found
        assert ("crossover", "time", arm) in found
        assert ("decode", "decode_forward", arm) in found
        assert ("capacity", "request_bytes", arm) in found
    assert all(line["value"] > 0 for line in lines)
    assert {line["command"] for line in lines} == {
        "onela bench --arms replay --arms full_state_copy --device cpu"
    }
    overlaps = [line["overlap"] for line in lines if line["metric"] == "decode_forward"]
    assert overlaps == [1.0, 1.0]


def test_the_page_stands_alone_and_holds_the_lines(measured: Path) -> None:
    text = (measured / "report.html").read_text()
    parsed = Page(text)
    assert not parsed.open
    assert not parsed.loads
    assert text.count("<svg") == 4  # no parts on a CPU
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    data = re.search(r'<script type="application/json" id="results">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == [
        json.loads(x) for x in (measured / "results.jsonl").read_text().splitlines()
    ]


def test_the_report_can_be_written_again(measured: Path, tmp_path: Path) -> None:
    run("bench", "--from", str(measured / "results.jsonl"), "--out", str(tmp_path))
    again, before = (tmp_path / "report.html").read_text(), (measured / "report.html").read_text()
    assert again == before
    (tmp_path / "bad.jsonl").write_text("[1]")
    for bad in ("bad.jsonl", "none.jsonl"):
        assert "--from" in run("bench", "--from", str(tmp_path / bad), "--out", str(tmp_path), code=2).stderr


def test_a_checkpoint_directory_lends_its_shape_or_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def note(model: Any, name: str, *rest: Any, **options: Any) -> None:
        names.append((name, float(model.model.embed_tokens.weight.float().std())))

    monkeypatch.setattr("onela.cli.bench.run_suite", note)
    save_qwen3_5(tmp_path / "mine")
    given = ["bench", str(tmp_path / "mine"), "--device", "cpu", "--no-plots", "--out", str(tmp_path / "out")]
    run(*given)
    (tmp_path / "mine" / "model.safetensors").unlink()
    run(*given)
    run(*given, "--quantization", "fp8")
    assert [name for name, _ in names] == ["mine", "mine, random weights", "mine, random weights, fp8"]
    assert names[0][1] != names[1][1]
    assert "no such directory" in run("bench", str(tmp_path / "none"), "--device", "cpu", code=2).stderr


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = "device: 'cuda' was asked for, and torch sees no GPU here; --device cpu runs a tiny version"
    assert told in run("bench", code=2).stderr
    told = "device: 'tpu' is none of auto, cpu, cuda, cuda:N"
    assert told in run("bench", "--device", "tpu", code=2).stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    told = "device: 'cuda:99' was asked for, and torch sees none after cuda:1 here"
    assert told in run("bench", "--device", "cuda:99", code=2).stderr


def test_without_matplotlib_it_says_so_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr("onela.cli.bench.run_suite", lambda *rest, **options: None)
    done = run("bench", "--device", "cpu", "--out", str(tmp_path), code=2)
    assert "pip install 'onela[bench]'" in done.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnavailableError, match="matplotlib"):
        figures.pyplot()
    run("bench", "--device", "cpu", "--out", str(tmp_path), "--no-plots")
    assert "Nothing was measured" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_written_or_read_is_said(measured: Path, tmp_path: Path) -> None:
    lines = str(measured / "results.jsonl")
    taken = tmp_path / "taken"
    taken.write_text("")
    for out in (taken, taken / "below"):
        for given in (("--from", lines), ("--device", "cpu")):
            said = run("bench", "--no-plots", "--out", str(out), *given, code=2).stderr
            assert f"--out: {out} is no directory that can be written to" in said
    assert f"--from: {taken} holds no lines of results" in run("bench", "--from", str(taken), code=2).stderr
    assert "Invalid value for '--tokens'" in run("bench", "--device", "cpu", "--tokens", "65", code=2).stderr


def test_a_lost_arm_is_said_on_the_page_and_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose(arm: str, *rest: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room") if arm == "replay" else ValueError("<b>")

    monkeypatch.setattr(suite, "operator", lose)
    monkeypatch.setattr(suite, "same_items", lambda *rest: None)
    monkeypatch.setattr(suite, "measure_model", lambda *rest: None)
    done = run("bench", "--device", "cpu", *ARMS, "--no-plots", "--out", str(tmp_path), code=1)
    assert "operator R=1 W=16 O=3 replay: does not fit" in done.stderr
    text = (tmp_path / "report.html").read_text()
    assert "ValueError: &lt;b&gt;" in text
    assert not Page(text).open


def test_the_gate_measures_nothing_when_backends_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "overlap", lambda left, right: (0.5, 0.0))
    with pytest.raises(OneLAError, match="nothing was measured"):
        suite.same_items(torch.device("cpu"), ("replay",))


def test_crossings() -> None:
    def row(arm: str, t: int, value: float) -> Line:
        return {"bench": "crossover", "metric": "time", "arm": arm, "case": {"t": t}, "value": value}

    rows = [row("replay", t, 10 + t) for t in (0, 6, 31)]
    rows += [row("full_state_copy", t, v) for t, v in ((0, 9), (6, 40), (31, 40))]
    rows += [row("replay_ssm", t, 100) for t in (0, 6, 31)]
    assert page.crossings(rows) == [
        "A step of full state per beam takes no longer than one of OneLA from 32 tokens on.",
        "A step of ReplaySSM takes longer than one of OneLA up to 32 tokens.",
    ]


def test_what_is_asked_for_changes_the_suite() -> None:
    cpu = torch.device("cpu")
    assert choose_suite(cpu, False, None, None, None, None, None) == suite.SMALL
    chosen = choose_suite(cpu, False, ["replay"], ["3x5"], [7, 9], 4, 11)
    assert chosen.model_shapes == ((3, 5),)
    assert chosen.operator_shapes == ((3, 5, 4),)
    assert (chosen.arms, chosen.prompts, chosen.tokens, chosen.codebook) == (("replay",), (7, 9), 4, 11)
    for wrong in ("4", "0x5", "4x", "4x5x6"):
        with pytest.raises(
            ConfigError, match=f"--shape: requests x beams such as 4x256 is expected, got '{wrong}'"
        ):
            choose_suite(cpu, False, None, [wrong], None, None, None)
        with pytest.raises(argparse.ArgumentTypeError, match=f"shape: .* got '{wrong}'"):
            parse_shape(wrong)
    with pytest.raises(ConfigError, match="arms: 'mine' is none of replay"):
        choose_suite(cpu, False, ["mine"], None, None, None, None)
    with pytest.raises(ConfigError, match="prompts: whole numbers of at least 1"):
        choose_suite(cpu, False, None, None, [0], None, None)
    assert "--quick, --full" in run("bench", "--quick", "--full", "--device", "cpu", code=2).stderr
    assert "--quantization" in run("bench", "--quantization", "int4", "--device", "cpu", code=2).stderr
    assert TINY["num_hidden_layers"] == 4
