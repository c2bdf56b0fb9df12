"""Read documents out of plain text, JSON lines, Parquet files and Hugging Face dataset directories.

What is a document:
  text     the whole file (a book stays together and is cut later, at the sequence length, with nothing lost); or, with
           `data.text_documents: sections`, each stretch between blank lines.
  jsonl    each line; parquet and dataset: each row. See `documents.document_from_record`.
  builtin  each topic of Python's reference (`pydoc_data.topics`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.data.documents import RECORD_FIELDS, Document, Text, document_from_record
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.sources import Source
from disaggkd_cli.errors import UserError

TEXT_DOCUMENTS = ("file", "sections")
_ROWS_AT_ONCE = 1024


def read_documents(
    source: Source, key: str, notes: Notes, records: str = "auto", text_documents: str = "file"
) -> Iterator[Document]:
    """The documents of one source, in its order.

    Raises:
        UserError: an empty or unreadable file, a broken line (with its number), a record of the wrong shape.
    """
    readers = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset, "builtin": _builtin}
    found = 0
    for where, item in readers[source.format](source.path, key, notes, text_documents):
        found += 1
        yield item if isinstance(item, Text) else document_from_record(item, where, records)
    if not found:
        raise UserError(f"{key}: {source.path} is empty: it holds no document")


def _text(path: Path, key: str, notes: Notes, text_documents: str) -> Iterator[tuple[str, Text]]:
    body = _decode(_bytes(path, key), str(path), 1)
    body = body.removeprefix("\ufeff").replace("\r\n", "\n")
    if text_documents == "file":
        if body.strip():
            yield str(path), Text(str(path), body)
        return
    at, line = 0, 1
    for blank in [*re.finditer(r"\n[ \t]*(?:\n[ \t]*)+", body), None]:
        end = blank.start() if blank else len(body)
        section = body[at:end]
        if section.strip():
            where = f"{path} line {line}"
            yield where, Text(where, section.strip("\n"))
        if blank:
            line += section.count("\n") + blank[0].count("\n")
            at = blank.end()


def _jsonl(path: Path, key: str, notes: Notes, _: str) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path} line {number}"
                line = _decode(raw, str(path), number).removeprefix("\ufeff").strip()
                if not line:
                    notes.add("{count} blank lines among the JSON lines were passed over (first: {first})", where)
                    continue
                yield where, _json(line, where, number)
    except OSError as error:
        raise UserError(f"{key}: {path} can't be read ({error.strerror})") from error


def _json(line: str, where: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        if number == 1 and line[0] in "[{" and len(line) < 3:
            hint = "The file looks like one JSON document over many lines; JSON lines hold one whole object each"
        else:
            hint = "Each line must be one whole JSON object"
        raise UserError(f"{where}: not JSON, {error.msg} at column {error.colno}: {shown!r}. {hint}.") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON that is nested too deeply") from error


def _parquet(path: Path, key: str, notes: Notes, _: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in RECORD_FIELDS]
            if not columns and file.metadata.num_rows:
                raise UserError(f"{key}: {path} has none of the columns {', '.join(RECORD_FIELDS)}; it has {names}")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path} row {row}", _without_nulls(record)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} can't be read as Parquet ({str(error).splitlines()[0]})") from error


def _dataset(path: Path, key: str, notes: Notes, _: str) -> Iterator[tuple[str, Any]]:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{key}: {path} can't be read as a Hugging Face dataset directory ({reason})") from error
    if isinstance(dataset, datasets.DatasetDict):
        names = ", ".join(f"{path / split}" for split in dataset)
        raise UserError(f"{key}: {path} holds several splits; name one of them: {names}")
    columns = [name for name in dataset.column_names if name in RECORD_FIELDS]
    if not columns and len(dataset):
        raise UserError(
            f"{key}: {path} has none of the columns {', '.join(RECORD_FIELDS)}; it has {dataset.column_names}"
        )
    rows = dataset.select_columns(columns).with_format("arrow")
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        for number, record in enumerate(rows[start : start + _ROWS_AT_ONCE].to_pylist(), start + 1):
            yield f"{path} row {number}", _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """A table gives every struct all fields that any row has, null where a row has none. Chat templates ask whether a
    field is there, so nulls go, all but a message's content."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _builtin(_path: Path, key: str, notes: Notes, _: str) -> Iterator[tuple[str, Text]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        where = f"builtin:pydoc {name}"
        yield where, Text(where, topics[name].strip() + "\n")


def _bytes(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{key}: {path} can't be read ({error.strerror})") from error


def _decode(raw: bytes, path: str, first_line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw[: error.start].count(b"\n")
        raise UserError(
            f"{path} line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file: iconv -t utf-8"
        ) from error
