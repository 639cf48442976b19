"""What the subcommands share: options, loading an engine, printing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from onela.engine import Engine
from onela.engine.examples import json_rows
from onela.errors import ConfigError
from onela.items import SidVocabulary

ModelPath = Annotated[
    Path, typer.Argument(help="Checkpoint directory (config.json, *.safetensors, tokenizer).")
]
CatalogOption = Annotated[
    Path | None, typer.Option("--catalog", help="Item catalogue: JSONL, parquet or a saved one.")
]
VocabularyOption = Annotated[
    Path | None,
    typer.Option(
        "--vocabulary", help="JSON list of token ids per SID level; default: found in the tokenizer."
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option(
        "--sid-pattern",
        help="How SID tokens read, a regular expression with groups level and code; default: <s_a_N>, <a_N>.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N or auto.")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or auto.")]
ForcedPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--forced-prefix",
        help="Text that every text prompt ends in; '' for none; default: the begin token of SIDs.",
    ),
]
ChatTemplateOption = Annotated[
    bool,
    typer.Option("--chat-template", help="Put plain-text prompts through the chat template too."),
]
ThinkingOption = Annotated[
    bool,
    typer.Option(
        "--enable-thinking", help="Let the chat template leave thinking on; default: an empty think block."
    ),
]
QuantizationOption = Annotated[
    str | None, typer.Option("--quantization", help="none, or fp8: mixers and MLPs in float8.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

console = Console()


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those that were given; the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def load_engine(
    model: Path,
    catalog: Path | None,
    vocabulary: Path | None,
    **options: Any,
) -> Engine:
    """An engine from command-line options."""
    return Engine.from_pretrained(
        model,
        catalog=catalog,
        vocabulary=None if vocabulary is None else read_vocabulary(vocabulary),
        **given(options),
    )


def read_vocabulary(path: Path) -> SidVocabulary:
    """Read a JSON list of lists of token ids. Raises `ConfigError`."""
    try:
        levels = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--vocabulary: {path} is not readable as JSON ({error})") from None
    if not isinstance(levels, list) or not all(isinstance(level, list) for level in levels):
        raise ConfigError(f"--vocabulary: {path} must hold a list of lists of token ids")
    return SidVocabulary.from_token_ids(levels)


def read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file and where each stands; `-`: standard input. Raises `ConfigError` that says where."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not readable ({error})") from None
    return [(f"{name}, line {number}", row) for number, row in json_rows(text, name)]


def print_json(value: Any) -> None:
    """Print one JSON document, unwrapped and uncoloured, for other programs."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_table(title: str, columns: list[str], rows: list[list[str]], *, num_text: int = 1) -> None:
    """Print a table; the first `num_text` columns are text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_text else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
