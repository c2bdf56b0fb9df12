"""JSON records out of files: a record a line, or one array of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.compressed import opened
from disaggkd_cli.errors import UserError


def json_lines(
    path: Path, key: str, notes: Notes, start: tuple[int, int]
) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """(where, record, (byte, line) where reading goes on) of each line from (byte, line) `start` on.

    Raises:
        UserError: a line that is not UTF-8 or not JSON, by its number.
    """
    at, before = start
    with opened(path, key, at) as file:
        for number, raw in enumerate(file, before + 1):
            at += len(raw)
            where = f"{path} line {number}"
            line = decoded(raw, str(path), number).removeprefix("\ufeff").strip()
            if not line:
                notes.add("{count} blank lines among the JSON lines were passed over (first: {first})", where)
                continue
            yield where, _parsed(line, where, number), (at, number)


def json_array(path: Path, key: str, first: int) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """(where, record, where reading goes on) of each record of one JSON array from number `first` on (from 0)."""
    with opened(path, key) as file:
        text = decoded(file.read(), str(path), 1).removeprefix("\ufeff")
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} line {error.lineno}: not JSON, {error.msg} at column {error.colno}. The file begins as one array "
            "of records; JSON lines hold an object a line"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path}: JSON that is nested too deeply") from error
    for number, record in enumerate(records[first:], first + 1):
        yield f"{path} record {number}", record, (number, 0)


def _parsed(line: str, where: str, number: int) -> Any:
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


def decoded(raw: bytes, path: str, first_line: int) -> str:
    """Text out of UTF-8.

    Raises:
        UserError: other bytes, by their line.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw[: error.start].count(b"\n")
        raise UserError(
            f"{path} line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file: iconv -t utf-8"
        ) from error
