"""Read documents out of everything that a source may be.

What is a document:
  text     the whole file (a book stays together and is cut later, at the sequence length, with nothing lost); or, with
           `data.text_documents: sections`, each stretch between blank lines.
  others   each line, row or record; see `records`.
  builtin  each topic of Python's reference (`pydoc_data.topics`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read import tables
from disaggkd_cli.data.read.compressed import opened
from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import Document, Text
from disaggkd_cli.data.read.finding import Source
from disaggkd_cli.data.read.lines import decoded, json_array, json_lines
from disaggkd_cli.data.read.records import KINDS, RecordForm
from disaggkd_cli.errors import UserError

TEXT_DOCUMENTS = ("file", "sections")
Place = tuple[int, int]
"""Where reading may go on: (byte, line) in JSON lines, (byte, 0) in text, (row, 0) in tables."""
_START: Place = (0, 0)
_BYTES_AT_ONCE = 1 << 20
_ANY = RecordForm()


@dataclass(frozen=True)
class Item:
    """A document, or a piece of a long text, and where reading goes on after it."""

    document: Document
    following: Place | None
    """None in the middle of a record, where reading can't begin."""


def read_documents(
    source: Source, key: str, notes: Notes, form: RecordForm = _ANY, text_documents: str = "file"
) -> Iterator[Document]:
    """The documents of one source, in its order; see `read_items`."""
    return (item.document for item in read_items(source, key, notes, form, text_documents))


def read_items(
    source: Source,
    key: str,
    notes: Notes,
    form: RecordForm = _ANY,
    text_documents: str = "file",
    start: Place = _START,
    cutter: TextCutter | None = None,
) -> Iterator[Item]:
    """The documents of one source, in its order, from `start` on; long texts in pieces, where there is a `cutter`.

    Raises:
        UserError: an empty or unreadable file, a broken line (with its number), a record of the wrong shape.
    """
    found = start != _START
    asked = Reading(source, key, notes, form, text_documents, start, cutter)
    for where, value, following in READERS[source.format](asked):
        found = True
        if isinstance(value, Text):
            yield Item(value, following)
            continue
        document, kind = form.document(value, where)
        if said := KINDS[kind].said:
            notes.add(f"{key}: {said}")
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


@dataclass(frozen=True)
class Reading:
    """What a reader is asked for: one source, from a place on.

    Attributes:
        source: what is read.
        key: the config key, for messages.
        notes: takes what the user is told once a run.
        form: how records are read; its `fields` are the columns that a table is read for.
        text_documents: one of TEXT_DOCUMENTS.
        start: where reading begins.
        cutter: cuts long texts, where there is one.
    """

    source: Source
    key: str
    notes: Notes
    form: RecordForm
    text_documents: str
    start: Place
    cutter: TextCutter | None


def _text(path: Path, key: str, start: Place, cutter: TextCutter | None) -> _Found:
    """The whole file as one text, read and given in pieces."""
    at = start[0]
    waiting = ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    enough = 2 * cutter.piece_characters if cutter else None
    try:
        with opened(path, key, at) as file:
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
    begins = at == 0
    body = _plain(waiting, begins)
    if body.strip() or not begins:
        yield str(path), Text(str(path), body, begins), (at + len(waiting.encode()), 0)


def _plain(text: str, begins: bool) -> str:
    return (text.removeprefix("\ufeff") if begins else text).replace("\r\n", "\n")


def _name_the_bad_line(path: Path, key: str) -> None:
    with opened(path, key) as file:
        for number, raw in enumerate(file, 1):
            decoded(raw, str(path), number)


def _sections(path: Path, key: str, start: Place) -> _Found:
    with opened(path, key) as file:
        body = _plain(decoded(file.read(), str(path), 1), begins=True)
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


def _builtin(first: int) -> _Found:
    from pydoc_data.topics import topics

    for number, name in enumerate(sorted(topics)[first:], first + 1):
        where = f"builtin:pydoc {name}"
        yield where, Text(where, topics[name].strip() + "\n"), (number, 0)


def _texts(asked: Reading) -> _Found:
    if asked.text_documents == "sections":
        return _sections(asked.source.path, asked.key, asked.start)
    return _text(asked.source.path, asked.key, asked.start, asked.cutter)


READERS: dict[str, Callable[[Reading], _Found]] = {
    "text": _texts,
    "jsonl": lambda asked: json_lines(asked.source.path, asked.key, asked.notes, asked.start),
    "json_array": lambda asked: json_array(asked.source.path, asked.key, asked.start[0]),
    "csv": lambda asked: tables.csv_rows(asked.source.path, asked.key, asked.form.fields, asked.start[0]),
    "parquet": lambda asked: tables.parquet_rows(asked.source.path, asked.key, asked.form.fields, asked.start[0]),
    "arrow": lambda asked: tables.arrow_rows(asked.source.path, asked.key, asked.form.fields, asked.start[0]),
    "dataset": lambda asked: tables.dataset_rows(asked.source, asked.key, asked.form.fields, asked.start[0]),
    "hub": lambda asked: tables.hub_rows(asked.source, asked.key, asked.form.fields, asked.start[0]),
    "builtin": lambda asked: _builtin(asked.start[0]),
}
"""By `Source.format`: (where, text or record, where reading goes on), one after the other."""
