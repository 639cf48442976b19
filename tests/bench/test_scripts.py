"""The project's benchmark scripts: a lost arm ends them with an exit code that says so."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bench.capacity
import bench.decode
import bench.run_all
from bench.common import Failures

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted(path for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text())
TINY = ["--device", "cpu", "--tiny", "--dtype", "float32", "--no-gate", "--requests", "2", "--width", "8"]
SIZES = ["--prompts", "20", "--tokens", "2", "--codebook", "32"]


class ParserError(Exception):
    """Raised with a script's parser, in the place of reading a command line."""


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arms: str) -> None:
    words = ["decode.py", *TINY, *SIZES, "--out", str(path), "--arms", *arms]
    monkeypatch.setattr("sys.argv", words)
    bench.decode.main()


def test_every_arm_has_its_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path / "lines.jsonl", "replay", "full_state_copy")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["arm"] for line in lines} == {"replay", "full_state_copy"}
    assert {line["bench"] for line in lines} == {"decode"}
    assert all(line["command"].startswith("python ") and "--out" not in line["command"] for line in lines)


def test_a_lost_arm_ends_in_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 without a result: no_such_arm, prompt 20"):
        run(monkeypatch, tmp_path / "lines.jsonl", "replay", "no_such_arm")
    arms = {json.loads(line)["arm"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()}
    assert arms == {"replay"}


GUARD = """import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""


def test_every_script_leaves_its_own_folder_before_it_imports_anything() -> None:
    assert len(SCRIPTS) > 20
    for path in SCRIPTS:
        before, _, after = path.read_text().partition(GUARD)
        assert after, f"{path.name} lacks the lines"
        imports = re.findall(r"^(?:import \w.*|from \S+ import .*)", before, re.MULTILINE)
        assert imports == ["from __future__ import annotations"], path.name


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS if "parse_args()" in path.read_text()])
def test_every_option_that_a_script_reads_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(parser: argparse.ArgumentParser) -> None:
        raise ParserError(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(ParserError) as made:
        importlib.import_module(f"bench.{name}").main()
    options = {action.dest for action in made.value.args[0]._actions}
    # What a script hands its command line on to is in files of its name.
    parts = {ROOT / "bench" / f"{name}.py", *(ROOT / "bench").glob(f"{name}_*.py")}
    source = "".join(path.read_text() for path in parts - set(SCRIPTS) | {ROOT / "bench" / f"{name}.py"})
    read = set(re.findall(r"(?<![\w.])(?:args|arguments)\.([a-z]\w*)\b(?!\()", source))
    read -= set(re.findall(r"(?<![\w.])(?:args|arguments)\.([a-z]\w*) = ", source))
    assert read <= options, f"{name}.py has no option for {read - options}"


ELSEWHERE = {"cpu", "items", "load_client", "plots", "report", "run_all"}
"""Scripts that measure on a CPU, or nothing."""


def test_every_script_that_measures_on_a_gpu_is_run_with_options_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {line.split()[0] for line in bench.run_all.COMMANDS}
    assert names == {path.stem for path in SCRIPTS} - ELSEWHERE
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise ParserError(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for line in bench.run_all.COMMANDS:
        name, *words = shlex.split(line)
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
        with pytest.raises(ParserError):
            importlib.import_module(f"bench.{name}").main()


def test_a_failing_script_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run_all.py"])
    monkeypatch.setattr(bench.run_all, "COMMANDS", ("report --no-such-option", "report --help"))
    with pytest.raises(SystemExit, match=r"^1 without a result: report --no-such-option$"):
        bench.run_all.main()
    assert "--check" in capfd.readouterr().out
    monkeypatch.setattr("sys.argv", ["run_all.py", "repotr"])
    with pytest.raises(SystemExit, match="2"):
        bench.run_all.main()
    assert "SCRIPT: 'repotr', expected one of report" in capfd.readouterr().err


def test_a_script_starts_where_nothing_has_loaded_the_standard_librarys_operator(tmp_path: Path) -> None:
    script = tmp_path / "bench" / "script.py"
    script.parent.mkdir()
    script.with_name("operator.py").write_text("raise ImportError('hidden')\n")
    script.write_text(f"{GUARD}\nimport argparse\n\nprint(sys.path[0])\n")
    # Without `site`, which may load half of the standard library before the script begins.
    done = subprocess.run([sys.executable, "-S", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path)), done.stderr


def test_failures_are_said_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    failures = Failures()
    failures.exit()
    failures.add("a", ValueError("b"))
    assert capsys.readouterr().out == "FAILED a: b\n"
    with pytest.raises(SystemExit, match="1 without a result: a"):
        failures.exit()


def test_what_capacity_says_is_held_and_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    sizes = [
        "--width",
        "16",
        "--prompt",
        "40",
        "--tokens",
        "4",
        "--codebook",
        "64",
        "--max-batch-rows",
        "100",
    ]
    words = ["capacity.py", "--tiny", "--device", "cpu", "--memory", "1040MiB", *sizes, "--out", str(path)]
    monkeypatch.setattr("sys.argv", words)
    bench.capacity.main()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["arm"] for line in lines} == {"replay", "full_state_copy"}
    for line in lines:
        assert line["value"] == line["found"]["held"] == line["found"]["answered"] > 1
        assert line["found"]["pool_bytes"] == line["pool_bytes"]
        assert (line["found"]["refused"], line["found"]["alone"]) == (1, 1.0)


def test_a_shape_may_name_its_prompts() -> None:
    assert bench.decode.parse_case("4x256") == (4, 256, None)
    assert bench.decode.parse_case("16x128:1024") == (16, 128, 1024)
    for text in ("4x256:", "4x256:0"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            bench.decode.parse_case(text)
