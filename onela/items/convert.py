"""One catalogue file into another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onela.items.catalog import Duplicates, ItemCatalog
from onela.items.parquet import write_parquet
from onela.items.storage import writing
from onela.items.vocabulary import SidVocabulary


def convert_catalog(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    vocabulary: SidVocabulary | None = None,
    format: str = "auto",
    *,
    num_levels: int | None = None,
    radix: int | None = None,
    info: str | os.PathLike[str] | None = None,
    duplicates: Duplicates = "error",
) -> ItemCatalog:
    """Read a catalogue in any known format and write it in one of ours.

    Args:
        src, vocabulary, format, num_levels, radix, info, duplicates: as `ItemCatalog.load`.
        dst: `*.jsonl` and `*.parquet` are written as such; anything else becomes a directory that loads memory-mapped.
    Returns:
        catalog: what was written.
    Raises:
        CatalogError: as `ItemCatalog.load` and `ItemCatalog.save`, or `dst` cannot be written.
    """
    catalog = ItemCatalog.load(
        src, vocabulary, format, num_levels=num_levels, radix=radix, info=info, duplicates=duplicates
    )
    target = Path(dst)
    if target.suffix not in (".jsonl", ".parquet"):
        catalog.save(target)
        return catalog
    # A reader never sees half a file, and a failure leaves the old one.
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if target.suffix == ".parquet":
                write_parquet(catalog.records(), staging)
            else:
                _write_jsonl(catalog, staging)
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
    return catalog


def _write_jsonl(catalog: ItemCatalog, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for item in catalog.records():
            record: dict[str, Any] = {"item_id": item.item_id, "sid": list(item.sid)}
            for field in ("title", "metadata", "weight"):
                value = getattr(item, field)
                if value is not None:
                    record[field] = value
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
