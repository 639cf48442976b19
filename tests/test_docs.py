"""The documents say what is true: files exist, links lead somewhere, the table of options is the dataclass."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from onela import EngineConfig
from tests.docs_tables import options_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
PATHS = re.compile(r"`((?:onela|tests|bench|docs|examples|deploy|\.ci)/[\w./-]*[\w-])`")
INSIDE = re.compile(r"`((?:ops|state|models|items|decoding|engine|serve|cli)/[\w./-]*[\w-])`")
LINKS = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_the_documents_exist(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in INSIDE.findall(text) if not (ROOT / "onela" / name).exists()]
    missing += [name for name in PATHS.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINKS.findall(text) if not (document.parent / name).exists()]
    assert not missing, f"{document.name} names {missing}"


def test_the_table_of_options_is_the_dataclass() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    inside = text.split("<!-- options -->")[1].split("<!-- /options -->")[0].strip()
    assert inside == options_table(EngineConfig)
    assert all(f"`{option.name}`" in inside for option in dataclasses.fields(EngineConfig))
