"""From what the user wrote (a file, a directory, a glob, `builtin:pydoc`) to the files to read and their format."""

from __future__ import annotations

import difflib
import glob
import re
from dataclasses import dataclass
from pathlib import Path

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.errors import UserError

FORMATS = ("auto", "text", "jsonl", "parquet", "dataset")
BUILTIN = ("builtin:pydoc",)
_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_DATASET_MARKS = ("dataset_dict.json", "state.json")
_SPLIT_OF_NAME = re.compile(r"^(train|test|validation|valid|val|dev|eval)(?=[-_.\d])", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One thing to read."""

    path: Path
    format: str
    """text, jsonl, parquet, dataset (a directory that `datasets.load_from_disk` reads) or builtin."""


def find_sources(value: str, key: str, format: str, notes: Notes) -> list[Source]:
    """The files behind `value`, sorted by path.

    Args:
        value: a file, a directory (read with its sub-directories), a glob, or `builtin:pydoc`.
        key: the config key, for messages.
        format: one of FORMATS; "auto" goes by the endings of the names.
        notes: is told what a directory holds and is not read.

    Raises:
        UserError: nothing there, nothing readable, or several formats or splits side by side.
    """
    if format not in FORMATS:
        raise UserError(f"data.format: {format} is none of {', '.join(FORMATS)}")
    if value.startswith("builtin:"):
        if value not in BUILTIN:
            raise UserError(f"{key}: {value} is not known; there is {', '.join(BUILTIN)}")
        return [Source(Path(value), "builtin")]
    path = Path(value).expanduser()
    if path.is_dir():
        if any((path / mark).is_file() for mark in _DATASET_MARKS):
            if format not in ("auto", "dataset"):
                raise UserError(f"{key}: {value} is a Hugging Face dataset directory, not data.format={format}")
            return [Source(path, "dataset")]
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        return _sources(_readable(files, value, key, format, notes), value, key, format)
    if path.exists():
        return _sources([path], value, key, format)
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in found if file.is_file()]
    if not files:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f" (did you mean {path.parent / near[0]}?)" if near else f" (looked from {Path.cwd()})"
        raise UserError(f"{key}: there is no file, directory or glob match for {value}{hint}")
    return _sources(files, value, key, format)


def _readable(files: list[Path], value: str, key: str, format: str, notes: Notes) -> list[Path]:
    """Of a directory's files those whose ending is known, and of the asked format."""
    wanted = "parquet or jsonl" if format == "dataset" else format
    kinds = {file: _FORMAT_OF_SUFFIX.get(file.suffix.lower()) for file in files}
    known = [file for file, kind in kinds.items() if kind and (format == "auto" or kind in wanted)]
    if not known:
        holds = ", ".join(sorted({file.name for file in files})[:5]) or "nothing"
        asked = "" if format == "auto" else f" of format {format}"
        raise UserError(
            f"{key}: the directory {value} holds no file{asked} that can be read (it holds {holds}). "
            f"Known endings: {', '.join(_FORMAT_OF_SUFFIX)}; another ending needs data.format and a glob."
        )
    for file in sorted(set(files) - set(known)):
        notes.add(f"{key}: {{count}} files of {value} were not read, for their ending (first: {{first}})", str(file))
    splits: dict[str, Path] = {}
    for file in known:
        if match := _SPLIT_OF_NAME.match(file.name):
            splits.setdefault(match[1].lower(), file)
    if len(splits) > 1:
        example = next(iter(splits.values()))
        raise UserError(
            f"{key}: {value} holds several splits ({', '.join(splits)}); name one by a glob, for instance "
            f"{key}='{example.parent}/{next(iter(splits))}*{example.suffix}'"
        )
    return known


def _sources(files: list[Path], value: str, key: str, format: str) -> list[Source]:
    formats: dict[str, Path] = {}
    sources = []
    for file in files:
        kind = _FORMAT_OF_SUFFIX.get(file.suffix.lower())
        if format not in ("auto", "dataset"):
            kind = format
        if kind is None:
            raise UserError(
                f"{key}: the ending of {file} says nothing about its format; set data.format to text, jsonl or parquet"
            )
        formats.setdefault(kind, file)
        sources.append(Source(file, kind))
    if len(formats) > 1:
        examples = ", ".join(f"{kind}: {file.name}" for kind, file in formats.items())
        raise UserError(f"{key}: {value} holds files of several formats ({examples}); set data.format, or use a glob")
    return sources
