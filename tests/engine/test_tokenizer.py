"""A checkpoint's tokenizer that cannot be loaded is the checkpoint's fault, whatever is raised for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onela.engine.tokenizer import load_tokenizer
from onela.errors import CheckpointError, VocabularyError
from onela.items import SidVocabulary
from tests.fixtures import save_openonerec


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", {"model": {"type": False}}),
        ("tokenizer.json", {"added_tokens": ""}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("config.json", {"eos_token_id": {}}),
    ],
)
def test_a_damaged_tokenizer_names_its_directory(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    save_openonerec(tmp_path)
    assert len(load_tokenizer(tmp_path))
    file = tmp_path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(VocabularyError, match="no tokenizer could be loaded"):
        SidVocabulary.from_tokenizer(tmp_path)


def test_no_directory_and_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(CheckpointError, match="no such directory"):
        load_tokenizer(tmp_path / "x")
