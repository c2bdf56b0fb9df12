"""Read documents out of plain text, JSON lines, Parquet files and Hugging Face dataset directories.

What is a document:
  text     the whole file (a book stays together and is cut later, at the sequence length, with nothing lost); or, with
           `data.text_documents: sections`, each stretch between blank lines.
  jsonl    each line; parquet and dataset: each row. See `documents.document_from_record`.
  builtin  each topic of Python's reference (`pydoc_data.topics`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import RECORD_FIELDS, Document, Text, document_from_record
from disaggkd_cli.data.read.source_files import Source
from disaggkd_cli.errors import UserError

TEXT_DOCUMENTS = ("file", "sections")
Place = tuple[int, int]
"""Where reading may go on: (byte, line) in JSON lines, (byte, 0) in text, (row, 0) in tables."""
_START: Place = (0, 0)
_ROWS_AT_ONCE = 1024
_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Item:
    """A document, or a piece of a long text, and where reading goes on after it."""

    document: Document
    following: Place | None
    """None in the middle of a record, where reading can't begin."""


def read_documents(
    source: Source, key: str, notes: Notes, records: str = "auto", text_documents: str = "file"
) -> Iterator[Document]:
    """The documents of one source, in its order; see `read_items`."""
    return (item.document for item in read_items(source, key, notes, records, text_documents))


def read_items(
    source: Source,
    key: str,
    notes: Notes,
    records: str = "auto",
    text_documents: str = "file",
    start: Place = _START,
    cutter: TextCutter | None = None,
) -> Iterator[Item]:
    """The documents of one source, in its order, from `start` on; long texts in pieces, where there is a `cutter`.

    Raises:
        UserError: an empty or unreadable file, a broken line (with its number), a record of the wrong shape.
    """
    readers = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset, "builtin": _builtin}
    if source.format == "text" and text_documents == "sections":
        readers["text"] = _sections
    found = start != _START
    for where, value, following in readers[source.format](source.path, key, notes, start, cutter):
        found = True
        if isinstance(value, Text):
            yield Item(value, following)
            continue
        document = document_from_record(value, where, records)
        if cutter is None or not isinstance(document, Text):
            yield Item(document, following)
            continue
        pieces = list(cutter.pieces(document.text))
        for number, piece in enumerate(pieces, 1):
            first, last = number == 1, number == len(pieces)
            yield Item(Text(where, piece, first, last), following if last else None)
    if not found:
        raise UserError(f"{key}: {source.path} is empty: it holds no document")


_Found = Iterator[tuple[str, Any, Place]]


def _text(path: Path, key: str, notes: Notes, start: Place, cutter: TextCutter | None) -> _Found:
    """The whole file as one text, read and given in pieces."""
    at = start[0]
    waiting = ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    enough = 2 * cutter.piece_characters if cutter else None
    try:
        with path.open("rb") as file:
            file.seek(at)
            while raw := file.read(_BYTES_AT_ONCE):
                waiting += decoder.decode(raw)
                while enough and len(waiting) >= enough and (cut := cutter.cut(waiting)) is not None:
                    piece, waiting = waiting[:cut], waiting[cut:]
                    begins, at = at == 0, at + len(piece.encode())
                    yield str(path), Text(str(path), _plain(piece, begins), begins, ends=False), (at, 0)
            waiting += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        _name_the_bad_line(path, key)
        raise
    except OSError as error:
        raise UserError(f"{key}: {path} can't be read ({error.strerror})") from error
    begins = at == 0
    body = _plain(waiting, begins)
    if body.strip() or not begins:
        yield str(path), Text(str(path), body, begins), (at + len(waiting.encode()), 0)


def _plain(text: str, begins: bool) -> str:
    return (text.removeprefix("\ufeff") if begins else text).replace("\r\n", "\n")


def _name_the_bad_line(path: Path, key: str) -> None:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            _decode(raw, str(path), number)


def _sections(path: Path, key: str, notes: Notes, start: Place, cutter: TextCutter | None) -> _Found:
    body = _plain(_decode(_bytes(path, key), str(path), 1), begins=True)
    at, line, number = 0, 1, 0
    for blank in [*re.finditer(r"\n[ \t]*(?:\n[ \t]*)+", body), None]:
        end = blank.start() if blank else len(body)
        section = body[at:end]
        if section.strip():
            number += 1
            if number > start[0]:
                where = f"{path} line {line}"
                yield where, Text(where, section.strip("\n")), (number, 0)
        if blank:
            line += section.count("\n") + blank[0].count("\n")
            at = blank.end()


def _jsonl(path: Path, key: str, notes: Notes, start: Place, _cutter: TextCutter | None) -> _Found:
    at, before = start
    try:
        with path.open("rb") as file:
            file.seek(at)
            for number, raw in enumerate(file, before + 1):
                at += len(raw)
                where = f"{path} line {number}"
                line = _decode(raw, str(path), number).removeprefix("\ufeff").strip()
                if not line:
                    notes.add("{count} blank lines among the JSON lines were passed over (first: {first})", where)
                    continue
                yield where, _json(line, where, number), (at, number)
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


def _parquet(path: Path, key: str, notes: Notes, start: Place, _cutter: TextCutter | None) -> _Found:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in RECORD_FIELDS]
            if not columns and file.metadata.num_rows:
                raise UserError(f"{key}: {path} has none of the columns {', '.join(RECORD_FIELDS)}; it has {names}")
            groups = list(range(file.metadata.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= start[0]:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, row_groups=groups):
                for record in batch.to_pylist():
                    row += 1
                    if row > start[0]:
                        yield f"{path} row {row}", _without_nulls(record), (row, 0)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} can't be read as Parquet ({str(error).splitlines()[0]})") from error


def _dataset(path: Path, key: str, notes: Notes, start: Place, _cutter: TextCutter | None) -> _Found:
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
    for first in range(start[0], len(dataset), _ROWS_AT_ONCE):
        for number, record in enumerate(rows[first : first + _ROWS_AT_ONCE].to_pylist(), first + 1):
            yield f"{path} row {number}", _without_nulls(record), (number, 0)


def _without_nulls(value: Any) -> Any:
    """A table gives every struct all fields that any row has, null where a row has none. Chat templates ask whether a
    field is there, so nulls go, all but a message's content."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _builtin(_path: Path, key: str, notes: Notes, start: Place, _cutter: TextCutter | None) -> _Found:
    from pydoc_data.topics import topics

    for number, name in enumerate(sorted(topics)[start[0] :], start[0] + 1):
        where = f"builtin:pydoc {name}"
        yield where, Text(where, topics[name].strip() + "\n"), (number, 0)


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
