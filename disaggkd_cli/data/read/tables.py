"""Rows of tables: Parquet, CSV, Arrow, directories of `datasets`, and data sets on the Hub.

What `datasets` loads is loaded by it. Parquet is read by row groups, so that reading can begin in the middle of a file;
CSV cell by cell, since the loaders guess types (an answer `NA` or `007` would not come through) and lines.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.data.read.compressed import opened
from disaggkd_cli.data.read.finding import Source
from disaggkd_cli.data.read.hub import load_hub
from disaggkd_cli.errors import UserError

Rows = Iterator[tuple[str, Any, tuple[int, int]]]
"""(where, row, where reading goes on)"""
_ROWS_AT_ONCE = 1024
_LARGEST_CELL = (1 << 31) - 1


def parquet_rows(path: Path, key: str, fields: tuple[str, ...], first: int) -> Rows:
    """Rows of a Parquet file from number `first` on (from 0)."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in fields]
            if file.metadata.num_rows:
                _require_columns(columns, names, path, key, fields)
            groups = list(range(file.metadata.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= first:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, row_groups=groups):
                for record in batch.to_pylist():
                    row += 1
                    if row > first:
                        yield f"{path} row {row}", _without_nulls(record), (row, 0)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} can't be read as Parquet ({str(error).splitlines()[0]})") from error


def csv_rows(path: Path, key: str, fields: tuple[str, ...], first: int) -> Rows:
    """Rows of comma-separated values (tabs in .tsv), whose first line names the columns; empty cells are null.

    Raises:
        UserError: not UTF-8, no known column, a row with another number of cells.
    """
    delimiter = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes) else ","
    csv.field_size_limit(_LARGEST_CELL)
    with opened(path, key) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if names:
                _require_columns([name for name in names if name in fields], names, path, key, fields)
            line = reader.line_num + 1
            for row, cells in enumerate((cells for cells in reader if cells), 1):
                where, line = f"{path} line {line}", reader.line_num + 1
                if len(cells) != len(names):
                    raise UserError(
                        f"{where}: has {len(cells)} cells, but the first line names {len(names)} columns "
                        f"({', '.join(names[:8])}); cells that hold the delimiter need quotes"
                    )
                if row > first:
                    yield where, {name: cell for name, cell in zip(names, cells, strict=True) if cell != ""}, (row, 0)
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} after line {reader.line_num}: not UTF-8 (byte 0x{error.object[error.start]:02x}); convert the "
                "file: iconv -t utf-8"
            ) from error


def arrow_rows(path: Path, key: str, fields: tuple[str, ...], first: int) -> Rows:
    """Rows of an Arrow file, as `datasets` writes them (a stream) or as others do (a file with a footer)."""
    import datasets
    import pyarrow

    def load() -> Any:
        try:
            return datasets.Dataset.from_file(str(path))
        except pyarrow.ArrowInvalid:
            return datasets.Dataset(pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all())

    return _dataset_rows(load, path, key, "an Arrow file", fields, first)


def dataset_rows(source: Source, key: str, fields: tuple[str, ...], first: int) -> Rows:
    """Rows of a directory that `save_to_disk` wrote."""
    import datasets

    what = "a Hugging Face dataset directory"
    return _dataset_rows(lambda: datasets.load_from_disk(str(source.path)), source.path, key, what, fields, first)


def hub_rows(source: Source, key: str, fields: tuple[str, ...], first: int) -> Rows:
    """Rows of a data set on the Hub, or of what `datasets` keeps of it on this machine."""
    return _dataset_rows(
        lambda: load_hub(str(source.path), source.config, source.split),
        source.path,
        key,
        "a file here, nor as a data set on the Hub",
        fields,
        first,
    )


def _dataset_rows(
    load: Callable[[], Any], path: Path, key: str, what: str, fields: tuple[str, ...], first: int
) -> Rows:
    import pyarrow

    try:
        dataset = load()
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{key}: {path} can't be read as {what} ({_first_line(error)})") from error
    columns = [name for name in dataset.column_names if name in fields]
    if len(dataset):
        _require_columns(columns, dataset.column_names, path, key, fields)
    rows = dataset.select_columns(columns).with_format("arrow")
    for start in range(first, len(dataset), _ROWS_AT_ONCE):
        for number, record in enumerate(rows[start : start + _ROWS_AT_ONCE].to_pylist(), start + 1):
            yield f"{path} row {number}", _without_nulls(record), (number, 0)


def _require_columns(columns: list[str], names: list[str], path: Path, key: str, fields: tuple[str, ...]) -> None:
    if not columns:
        raise UserError(
            f"{key}: {path} has none of the columns {', '.join(fields)}; it has {names}. Other names: "
            "data.columns, for instance data.columns={prompt: question, completion: answer}"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_nulls(value: Any) -> Any:
    """A table gives every struct all fields that any row has, null where a row has none. Chat templates ask whether a
    field is there, so nulls go, all but a message's content."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
