"""`onela catalog`: look into a catalogue or a checkpoint's SID vocabulary before serving from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onela.cli.common import (
    JsonOption,
    PatternOption,
    VocabularyOption,
    print_json,
    print_table,
    read_vocabulary,
)
from onela.engine.tokenizer import load_tokenizer
from onela.errors import CheckpointError, ConfigError
from onela.items import ItemCatalog, SidVocabulary
from onela.items.convert import convert_catalog
from onela.items.readers import READERS

catalog_app = typer.Typer(help="Check, inspect and convert item catalogues.", no_args_is_help=True)

Source = Annotated[Path, typer.Argument(help="Catalogue in any known format.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint whose tokenizer names the SID tokens.")
]
FormatOption = Annotated[str, typer.Option("--format", help=f"auto, onela, {', '.join(READERS)}.")]
RadixOption = Annotated[
    int | None,
    typer.Option("--radix", min=2, help="Packed keys: codes per level; default: the codebook size."),
]
LevelsOption = Annotated[int | None, typer.Option("--num-levels", min=1, help="Packed keys: codes per key.")]
InfoOption = Annotated[
    Path | None, typer.Option("--info", help="MiniOneRec: the info.txt beside index.json.")
]
KeepBestOption = Annotated[
    bool,
    typer.Option("--keep-best", help="An item given twice keeps its heaviest SID instead of failing."),
]


@catalog_app.command("check")
def check(
    source: Source,
    model: ModelOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    source_format: FormatOption = "auto",
    radix: RadixOption = None,
    num_levels: LevelsOption = None,
    info: InfoOption = None,
    keep_best: KeepBestOption = False,
    json_output: JsonOption = False,
) -> None:
    """Load a catalogue, report every count, and fail on the first malformed line, or on a saved one that is damaged."""
    catalog = ItemCatalog.load(
        source,
        vocabulary=_vocabulary(model, vocabulary, sid_pattern),
        format=source_format,
        num_levels=num_levels,
        radix=radix,
        info=info,
        duplicates="best" if keep_best else "error",
    )
    catalog.verify()
    facts = {
        "items": catalog.num_items,
        "sids": catalog.num_sids,
        "levels": catalog.num_levels,
        "codebook_sizes": list(catalog.codebook_sizes),
        "most_items_on_one_sid": catalog.max_items_per_sid,
        "version": catalog.version,
    }
    if json_output:
        print_json(facts)
    else:
        print_table(str(source), ["fact", "value"], [[name, str(value)] for name, value in facts.items()])


@catalog_app.command("inspect")
def inspect(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory with a tokenizer.")],
    sid_pattern: PatternOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print which tokens of a checkpoint were read as SID codes, level by level, to confirm."""
    found = _vocabulary(model, None, sid_pattern)
    assert found is not None
    if not json_output:
        typer.echo(found.describe())
        return
    levels = [
        {"level": level, "codes": found.codes(level).tolist(), "token_ids": found.token_ids(level).tolist()}
        for level in range(found.num_levels)
    ]
    print_json(
        {
            "convention": found.convention,
            "begin_token_id": found.begin_token_id,
            "end_token_id": found.end_token_id,
            "levels": levels,
        }
    )


@catalog_app.command("convert")
def convert(
    source: Source,
    target: Annotated[
        Path, typer.Argument(help="*.jsonl, *.parquet, or a directory that loads memory-mapped.")
    ],
    model: ModelOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    source_format: FormatOption = "auto",
    radix: RadixOption = None,
    num_levels: LevelsOption = None,
    info: InfoOption = None,
    keep_best: KeepBestOption = False,
    json_output: JsonOption = False,
) -> None:
    """Read a catalogue in any known format and write it in one of ours."""
    catalog = convert_catalog(
        source,
        target,
        _vocabulary(model, vocabulary, sid_pattern),
        source_format,
        num_levels=num_levels,
        radix=radix,
        info=info,
        duplicates="best" if keep_best else "error",
    )
    facts = {
        "target": str(target),
        "items": catalog.num_items,
        "sids": catalog.num_sids,
        "version": catalog.version,
    }
    if json_output:
        print_json(facts)
    else:
        typer.echo(
            f"{target}: {catalog.num_items} items on {catalog.num_sids} SIDs, version {catalog.version}"
        )


def _vocabulary(model: Path | None, vocabulary: Path | None, sid_pattern: str | None) -> SidVocabulary | None:
    """What the options name, if anything. Raises `ConfigError`, `CheckpointError`, `VocabularyError`."""
    if vocabulary is not None and (model is not None or sid_pattern is not None):
        raise ConfigError(
            f"--vocabulary: {vocabulary} names all SID tokens; give it without --model and --sid-pattern"
        )
    if sid_pattern is not None and model is None:
        raise ConfigError(f"--sid-pattern: {sid_pattern!r} needs --model, whose tokenizer it is for")
    if vocabulary is not None:
        return read_vocabulary(vocabulary)
    if model is None:
        return None
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise CheckpointError(f"{model}: no tokenizer")
    return SidVocabulary.from_tokenizer(tokenizer, sid_pattern)
