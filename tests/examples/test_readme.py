"""What README.md shows on the demo's checkpoint is run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples.movielens.checkpoint import load_weights, write_checkpoint
from examples.movielens.data import MovieLens
from onela.cli.main import app

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def test_the_examples_run(
    movielens: MovieLens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "build" / "demo" / "checkpoint", load_weights(movielens), movielens)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 20
    set_up = re.search(r"MODEL=(\S+) ITEMS=(\S+)", README)
    assert set_up is not None
    commands = re.findall(r"^    onela (recommend|verify|catalog inspect) (.*?)(?: +#.*)?$", README, re.M)
    assert [name for name, _ in commands] == ["recommend", "verify", "catalog inspect"]
    for name, rest in commands:
        arguments = shlex.split(rest.replace("$MODEL", set_up[1]).replace("$ITEMS", set_up[2]))
        with pytest.raises(SystemExit) as done:
            app([*name.split(), *arguments])
        assert not done.value.code
    assert "Star Wars" in capsys.readouterr().out
