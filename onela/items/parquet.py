"""Catalogues in parquet, read and written a batch at a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from onela.errors import CatalogError, UnavailableError
from onela.items.builder import CatalogBuilder, to_json
from onela.items.columns import StringColumn, is_unicode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from onela.items.builder import CatalogItem

_ROWS_AT_ONCE = 1 << 18
# What other people call the columns; the first name is ours.
_COLUMNS = {
    "item_id": ("item_id", "pid", "iid"),
    "sid": ("sid",),
    "title": ("title",),
    "metadata": ("metadata",),
    "weight": ("weight", "count"),
}


def read_parquet(path: Path, builder: CatalogBuilder) -> None:
    """Add all rows; columns other than the known ones are left unread.

    Raises:
        CatalogError: not parquet, a column missing, present under two names or of a wrong type; a null id or SID.
        UnavailableError: pyarrow is not installed.
    """
    pa = _pyarrow()
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise CatalogError(f"not a parquet file: {error}", path=str(path)) from error
    names = _choose(path, file.schema_arrow.names)
    first = 1
    try:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(names.values())):
            columns = {field: batch.column(name) for field, name in names.items()}
            _add_batch(pa, builder, columns, first)
            first += len(batch)
    except CatalogError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise CatalogError(
            f"cannot be read after row {first - 1}: {error}", path=str(path), line=first
        ) from error
    finally:
        file.close()


def _choose(path: Path, present: list[str]) -> dict[str, str]:
    names = {}
    for field, aliases in _COLUMNS.items():
        found = [alias for alias in aliases if alias in present]
        if len(found) > 1:
            raise CatalogError(
                f"columns {' and '.join(map(repr, found))} both name the {field}", path=str(path)
            )
        if not found and field in ("item_id", "sid"):
            wanted = " or ".join(map(repr, aliases))
            raise CatalogError(
                f"no column {wanted}; there are {', '.join(present) or 'none'}", path=str(path)
            )
        if found:
            names[field] = found[0]
    return names


def _add_batch(pa: ModuleType, builder: CatalogBuilder, columns: dict[str, Any], first: int) -> None:
    for field in ("item_id", "sid"):
        if columns[field].null_count:
            row = columns[field].is_null().to_numpy(zero_copy_only=False).argmax()
            builder.fail(f"{field}: is null", first + int(row))
    metadata = _json_column(pa, builder, columns.get("metadata"), first)
    ids = _ids(pa, builder, columns["item_id"], first)
    sids = _sids(pa, builder, columns["sid"], first)
    titles = columns.get("title")
    if titles is not None:
        titles = StringColumn.from_strings(_strings(pa, builder, titles, "title", first))
    weights = columns.get("weight")
    if weights is not None:
        if not (pa.types.is_integer(weights.type) or pa.types.is_floating(weights.type)):
            builder.fail(f"weight: column of type {weights.type}, expected numbers", first)
        all_null = weights.null_count == len(weights)
        weights = None if all_null else weights.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    builder.add_block(ids, sids, titles, metadata, weights, first_line=first)


def _ids(pa: ModuleType, builder: CatalogBuilder, column: Any, first: int) -> np.ndarray | StringColumn:
    if not pa.types.is_integer(column.type):
        return StringColumn.from_strings(_strings(pa, builder, column, "item_id", first))
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64 and len(values) and int(values.max()) >= 2**63:
        row = int(np.argmax(values >= 2**63))
        builder.fail(f"item_id: {values[row]} does not fit 64 bits", first + row)
    return values.astype(np.int64)


def _sids(pa: ModuleType, builder: CatalogBuilder, column: Any, first: int) -> np.ndarray:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not (is_list and pa.types.is_integer(kind.value_type)):
        texts = column.to_pylist() if is_list else _strings(pa, builder, column, "sid", first)
        rows = [builder.check_sid(text, first + row) for row, text in enumerate(texts)]
        return np.array(rows, dtype=np.int64)
    if not pa.types.is_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    lengths = np.diff(column.offsets.to_numpy())
    num_levels = builder.num_levels or int(lengths[0])
    wrong = np.flatnonzero(lengths != num_levels)
    if num_levels == 0 or len(wrong):
        row = int(wrong[0]) if len(wrong) else 0
        builder.fail(f"sid: {lengths[row]} levels, expected {num_levels or 'at least 1'}", first + row)
    values = column.flatten()
    if values.null_count:
        row = int(values.is_null().to_numpy(zero_copy_only=False).argmax()) // num_levels
        builder.fail("sid: holds a null", first + row)
    sids: np.ndarray = values.to_numpy(zero_copy_only=False)
    return sids.reshape(-1, num_levels)


def _json_column(pa: ModuleType, builder: CatalogBuilder, column: Any, first: int) -> StringColumn | None:
    """A string column holds JSON text; a column of any other type is turned into JSON."""
    if column is None:
        return None
    texts: list[str | None] = []
    is_text = _is_text(pa, column.type)
    for row, value in enumerate(column.to_pylist()):
        if value is None:
            texts.append(None)
            continue
        try:
            text = to_json(json.loads(value) if is_text else value)
        except (TypeError, ValueError, RecursionError) as error:
            builder.fail(f"metadata: {'not JSON text' if is_text else 'no JSON value'}: {error}", first + row)
        if not is_unicode(text):
            builder.fail(f"metadata: {text!r} is not valid Unicode", first + row)
        texts.append(text)
    return StringColumn.from_strings(texts)


def _strings(
    pa: ModuleType, builder: CatalogBuilder, column: Any, field: str, first: int
) -> list[str | None]:
    if not _is_text(pa, column.type):
        builder.fail(f"{field}: column of type {column.type}", first)
    texts: list[str | None] = column.to_pylist()
    return texts


def _is_text(pa: ModuleType, kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def write_parquet(records: Iterable[CatalogItem], path: Path) -> None:
    """Write items with the columns item_id, sid, title, metadata (JSON text) and weight."""
    pa = _pyarrow()
    import pyarrow.parquet

    writer: Any = None
    rows: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal writer
        schema = pa.schema(
            [
                ("item_id", pa.int64() if isinstance(rows[0]["item_id"], int) else pa.string()),
                ("sid", pa.list_(pa.int32())),
                ("title", pa.string()),
                ("metadata", pa.string()),
                ("weight", pa.float64()),
            ]
        )
        writer = writer or pyarrow.parquet.ParquetWriter(path, schema)
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        rows.clear()

    for item in records:
        text = None if item.metadata is None else to_json(item.metadata)
        rows.append(
            {
                "item_id": item.item_id,
                "sid": list(item.sid),
                "title": item.title,
                "metadata": text,
                "weight": item.weight,
            }
        )
        if len(rows) == _ROWS_AT_ONCE:
            flush()
    if rows:
        flush()
    if writer is not None:
        writer.close()


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise UnavailableError(
            "parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    module: ModuleType = pyarrow
    return module
