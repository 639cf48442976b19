"""The command line, run as a user would."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.text import Text
from transformers import AutoTokenizer

import onela
from onela.cli.main import COMMANDS, app, load_command
from tests.checkpoints import save_qwen3
from tests.engine.helpers import random_sids, save_qwen3_5, vocabulary_of
from tests.fixtures import Published, make_tokenizer, save_minionerec, save_openonerec

SIZES = (5, 6, 4)


@dataclass
class Done:
    """What a command printed."""

    stdout: str
    stderr: str


def run(*args: str, code: int = 0, stdin: str = "") -> Done:
    """Run a command in this process, as `onela` would."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        pytest.raises(SystemExit) as caught,
    ):
        app(list(args))
    assert (caught.value.code or 0) == code, err.getvalue() + out.getvalue()
    return Done(out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("cli")
    save_qwen3_5(path / "model")
    vocabulary = vocabulary_of(*SIZES)
    levels = [vocabulary.token_ids(level).tolist() for level in range(3)]
    (path / "vocabulary.json").write_text(json.dumps(levels))
    rows = [{"item_id": i, "sid": sid, "title": f"Film {i}"} for i, sid in enumerate(random_sids(40, SIZES))]
    (path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path / name) for name in ("model", "vocabulary.json", "items.jsonl")}


def arguments(files: dict[str, str]) -> list[str]:
    return [files["model"], "--catalog", files["items.jsonl"], "--vocabulary", files["vocabulary.json"]]


def test_recommend(files: dict[str, str]) -> None:
    done = run("recommend", *arguments(files), "--tokens", "1,2,3", "--tokens", "4 5", "-n", "3", "--json")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        assert len(answer["items"]) == 3
        assert answer["finish_reason"] == "stop"
        assert answer["items"][0]["titles"][0].startswith("Film ")
    table = run("recommend", *arguments(files), "--tokens", "1,2,3", "-n", "3").stdout
    assert "Film" in table
    assert "cum_logprob" in table
    one_beam = [*arguments(files), "--tokens", "1", "--beam-width", "1"]
    assert "1 items (stop)" in run("recommend", *one_beam).stdout
    assert "num_return_sequences: at most" in run("recommend", *one_beam, "-n", "2", code=2).stderr


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return save_openonerec(tmp_path_factory.mktemp("openonerec"), codebook_size=4)


THINK, HEAD, TAIL = "<think>\n\n</think>\n\n", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "Hi<|sid_begin|>"),
        (["--forced-prefix", ""], "Hi"),
        (["--forced-prefix", "Next: <|sid_begin|>"], "HiNext: <|sid_begin|>"),
        (["--chat-template"], f"{HEAD}Hi{TAIL}{THINK}<|sid_begin|>"),
        (["--chat-template", "--enable-thinking", "--forced-prefix", ""], f"{HEAD}Hi{TAIL}"),
    ],
)
def test_how_text_becomes_tokens(chatting: Published, options: list[str], expected: str) -> None:
    """Of `recommend` by the length of the prompt that ran, of `serve` by the engine that it would have run."""
    tokenizer = AutoTokenizer.from_pretrained(chatting.path)
    tokens = tokenizer(expected, add_special_tokens=False)["input_ids"]
    asked = ["--prompt", "Hi", "--beam-width", "2", "--device", "cpu", "--json"]
    done = run("recommend", str(chatting.path), *asked, *options)
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == len(tokens)
    with mock.patch("onela.serve.run.DrainingServer") as served:
        run("serve", str(chatting.path), "--device", "cpu", "--port", "0", *options)
    app = served.call_args.args[0]
    encoder = app.state.server.engine.engine.prompt_encoder
    assert encoder.encode(onela.Request(prompt="Hi")).tolist() == tokens


def test_recommend_from_a_file_and_from_standard_input(files: dict[str, str], tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [7], "request_id": "u1"}, {"prompt_token_ids": [8], "params": {"n": 2}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "requests.jsonl").write_text(text)
    from_file = run(
        "recommend", *arguments(files), "--requests", str(tmp_path / "requests.jsonl"), "--json"
    ).stdout
    from_input = run("recommend", *arguments(files), "--requests", "-", "--json", stdin=text).stdout

    def answers(output: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in output.splitlines()]

    assert [a["request_id"] for a in answers(from_file)] == ["u1", None]
    assert [len(a["items"]) for a in answers(from_file)] == [10, 2]
    assert [a["items"] for a in answers(from_file)] == [a["items"] for a in answers(from_input)]


def test_a_file_of_requests_may_have_all_of_a_request_and_errors_name_the_line(
    files: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    asked = ["recommend", *arguments(files), "--requests", str(file), "--json"]
    file.write_text('{"prompt_token_ids": [7]}\n')
    first, *others = json.loads(run(*asked).stdout)["items"]
    file.write_text(json.dumps({"prompt_token_ids": [7], "exclude_item_ids": first["item_ids"]}) + "\n")
    assert [item["sid"] for item in json.loads(run(*asked).stdout)["items"]][: len(others)] == [
        item["sid"] for item in others
    ]
    for line, wrong in (
        ({"prompt_token_ids": [7], "colour": 1}, "colour: unknown field; known are allow_item_ids, "),
        ({"prompt_token_ids": [7], "params": {"n": 0}}, "n: a whole number of at least 1"),
        ({}, "prompt_token_ids: give exactly one"),
        (None, "has none"),
    ):
        file.write_text("\n" if line is None else "\n" + json.dumps(line) + "\n")
        done = run(*asked, code=2)
        assert wrong in done.stderr
        assert str(file) in done.stderr
        assert line is None or f"{file}, line 2: {wrong}" in done.stderr


def test_verify(files: dict[str, str]) -> None:
    done = run("verify", *arguments(files), "--beam-width", "16", "--prompt-tokens", "40", "--json")
    report = json.loads(done.stdout)
    assert {line["backend"] for line in report["backends"]} >= {
        "replay",
        "full_state_copy",
        "replay_ssm_shared",
    }
    assert report["max_score_difference"] < 1e-4
    assert all(line["overlap"] == 1.0 for line in report["backends"])


def test_capacity_of_the_published_case_and_of_a_model(files: dict[str, str]) -> None:
    lines = json.loads(run("capacity", "--json").stdout)
    ratios = {
        (line["tokens"], line["accounting"], line["backend"]): (
            line["persistent_ratio"],
            line["written_ratio"],
        )
        for line in lines
    }
    persistent, written = ratios[3, "published accounting", "replay"]
    assert (round(persistent, 1), round(written)) == (56.5, 127)
    assert round(ratios[7, "published accounting", "replay"][0], 1) == 20.3
    assert ratios[3, "own default", "replay"][0] >= 110
    assert len(json.loads(run("capacity", files["model"], "-O", "3", "--json").stdout)) == 7


def test_capacity_says_how_many_requests_fit(files: dict[str, str]) -> None:
    given = ["capacity", files["model"], "-O", "3", "-W", "24", "--prompt", "100", "--codebook", "24"]
    lines = json.loads(run(*given, "--memory", "1.5GiB", "--json").stdout)
    fits = {line["backend"]: line for line in lines if line["accounting"] == "requests that fit"}
    assert len(fits) == 5
    assert fits["replay"]["num_requests"] > 2 * fits["full_state_copy"]["num_requests"] > 0
    for line in fits.values():
        assert line["memory_bytes"] == 3 << 29
        used = sum(line["parts"].values())
        # `request_bytes` is what the pools hold of one; the workspace grows with the requests too.
        assert used <= line["memory_bytes"] < used + 2 * line["request_bytes"]
        assert line["limits"]["max_prompts"] == line["num_requests"]
    assert "fit into 2.0 GiB" in run(*given, "--memory", "2GB").stdout
    assert "a size such as 139GiB" in run(*given, "--memory", "much", code=2).stderr
    assert "needs a checkpoint" in run("capacity", "--memory", "1G", code=2).stderr
    assert "Invalid value for '--tokens'" in run("capacity", "-O", "65", code=2).stderr
    assert "Invalid value for '--beam-width'" in run("capacity", "-W", "65537", code=2).stderr
    assert "--dtype" in run(*given, "--dtype", "int4", code=2).stderr


def test_catalog_check(files: dict[str, str], tmp_path: Path) -> None:
    facts = json.loads(run("catalog", "check", files["items.jsonl"], "--json").stdout)
    assert (facts["items"], facts["sids"], facts["levels"]) == (40, 40, 3)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"item_id": 1, "sid": [0, 0, 0]}\n{"item_id": 2, "sid": [0, 0]}\n')
    assert "line 2" in run("catalog", "check", str(broken), code=2).stderr
    options = ["--format", "nvidia", "--vocabulary", files["vocabulary.json"]]
    assert "field" in run("catalog", "check", files["items.jsonl"], *options, code=2).stderr


def test_a_model_that_is_not_known_is_named_first(tmp_path: Path) -> None:
    """Whatever else may be missing: those that are known are what the user has to see."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = run("recommend", str(tmp_path), "--tokens", "1", "--device", "cpu", code=2)
    assert done.stderr.startswith("onela: config.json: model_type 'llama' is none of qwen3, qwen3_5,")


def test_catalog_convert(files: dict[str, str], tmp_path: Path) -> None:
    for target in ("items.parquet", "saved", "again.jsonl"):
        done = run("catalog", "convert", files["items.jsonl"], str(tmp_path / target))
        assert "40 items on 40 SIDs" in done.stdout
    versions = {
        json.loads(run("catalog", "check", str(tmp_path / target), "--json").stdout)["version"]
        for target in ("items.parquet", "saved", "again.jsonl")
    }
    assert len(versions) == 1
    titles = tmp_path / "saved" / "titles_data.npy"
    titles.write_bytes(titles.read_bytes()[:-1] + b"?")
    damaged = run("catalog", "check", str(tmp_path / "saved"), code=2).stderr
    assert "saved: is damaged: its content has the version" in damaged


def test_catalog_inspect(tmp_path: Path) -> None:
    model = str(save_minionerec(tmp_path).path)
    report = json.loads(run("catalog", "inspect", model, "--json").stdout)
    assert [level["level"] for level in report["levels"]] == [0, 1, 2]
    assert all(len(level["codes"]) == len(level["token_ids"]) > 0 for level in report["levels"])
    assert "levels" in run("catalog", "inspect", model).stdout


def test_sid_tokens_of_another_reading(tmp_path: Path) -> None:
    """A checkpoint that writes `[2:7]` for code 7 of level 2: refused until it is told how they read."""
    tokens = [f"[{level}:{code}]" for level in range(3) for code in range(5)]
    tokenizer = make_tokenizer(tokens)
    save_qwen3(tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    model, pattern = str(tmp_path), r"\[(?P<level>\d+):(?P<code>\d+)\]"
    refused = run("catalog", "inspect", model, code=2).stderr
    assert "no SID tokens" in refused
    assert "--sid-pattern" in refused
    report = json.loads(run("catalog", "inspect", model, "--sid-pattern", pattern, "--json").stdout)
    assert [level["codes"] for level in report["levels"]] == [list(range(5))] * 3
    first = tokenizer.convert_tokens_to_ids("[0:0]")
    assert [level["token_ids"][0] for level in report["levels"]] == [first, first + 5, first + 10]
    catalog = tmp_path / "items.jsonl"
    catalog.write_text('{"item_id": 1, "sid": "[0:1][1:2][2:3]"}\n{"item_id": 2, "sid": [4, 0, 4]}\n')
    options = ["--sid-pattern", pattern, "--catalog", str(catalog), "--device", "cpu", "--json"]
    answer = json.loads(run("recommend", model, "--prompt", "[0:1][1:1]", "-n", "2", *options).stdout)
    assert answer["usage"]["prompt_tokens"] == 2
    assert {item["item_ids"][0]: item["sid"] for item in answer["items"]} == {1: [1, 2, 3], 2: [4, 0, 4]}
    both = run("recommend", model, "--tokens", "1", "--vocabulary", _levels(tmp_path), *options, code=2)
    assert both.stderr == "onela: sid_pattern: give it or a vocabulary, not both\n"
    check = ["catalog", "check", str(catalog)]
    for more in (["--model", model], ["--sid-pattern", pattern]):
        refused = run(*check, "--vocabulary", _levels(tmp_path), *more, code=2).stderr
        assert "names all SID tokens; give it without --model and --sid-pattern" in refused
    assert "needs --model, whose tokenizer" in run(*check, "--sid-pattern", pattern, code=2).stderr
    assert run(*check, "--model", model, "--sid-pattern", pattern).stdout


def _levels(path: Path) -> str:
    file = path / "levels.json"
    file.write_text("[[1], [2]]")
    return str(file)


def test_errors_are_one_line_and_exit_code_2(files: dict[str, str]) -> None:
    for args in (
        ["recommend", "/nowhere", "--tokens", "1"],
        ["recommend", *arguments(files)],
        ["recommend", *arguments(files), "--tokens", "1,x"],
        ["recommend", *arguments(files), "--tokens", "1", "--normalizer", "none"],
        ["recommend", files["model"], "--tokens", "1"],
    ):
        error = run(*args, code=2).stderr.strip()
        assert error.startswith("onela: ")
        assert len(error.splitlines()) == 1, error


def test_a_checkpoint_that_is_not_there_is_called_so() -> None:
    for command in (["recommend", "/nowhere", "--tokens", "1"], ["catalog", "inspect", "/nowhere"]):
        assert run(*command, code=2).stderr.strip() == "onela: /nowhere: no such directory"


def test_version_and_help() -> None:
    assert json.loads(run("version", "--json").stdout)["onela"]
    assert run("--version").stdout.strip() == onela.__version__
    text = run("--help").stdout
    for command in ("recommend", "capacity", "catalog", "verify", "version"):
        assert command in text


def test_the_entry_point_leaves_with_the_exit_code() -> None:
    command = [sys.executable, "-m", "onela.cli.main", "recommend", "/nowhere", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("onela: ")


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    for name, (_, summary) in COMMANDS.items():
        command = load_command(name)
        assert command.name == name
        assert (command.help or "").strip().split("\n")[0] == summary


def test_help_is_shown_as_it_is_written() -> None:
    """Square brackets would be read as markup, and left out."""
    commands = [load_command(name) for name in COMMANDS]
    commands += [inner for command in commands for inner in getattr(command, "commands", {}).values()]
    texts = [getattr(part, "help", None) or "" for command in commands for part in (command, *command.params)]
    assert len(texts) > 80
    for text in texts:
        assert Text.from_markup(text).plain == text
