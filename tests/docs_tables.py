"""Tables in the documents that are made from dataclasses. `python -m tests.docs_tables` writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from onela import EngineConfig

DOCUMENT = Path(__file__).parent.parent / "docs" / "environment.md"


def options_table(config: type[Any]) -> str:
    """A Markdown table of a configuration's fields, defaults and help texts."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{option.name}` | `{option.default}` | {option.metadata['help']} |"
        for option in dataclasses.fields(config)
    ]
    return "\n".join(lines)


def main() -> None:
    text = DOCUMENT.read_text()
    head, rest = text.split("<!-- options -->")
    tail = rest.split("<!-- /options -->")[1]
    DOCUMENT.write_text(f"{head}<!-- options -->\n{options_table(EngineConfig)}\n<!-- /options -->{tail}")


if __name__ == "__main__":
    main()
