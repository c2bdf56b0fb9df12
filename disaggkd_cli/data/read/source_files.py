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


@dataclass(frozen=True)
class SourceFiles:
    """One source of `data.train` or `data.eval`: its files, and how they are read."""

    name: str
    """The path as the user wrote it, or the source's name in the config."""
    key: str
    """The config key, for messages."""
    files: list[Source]
    format: str
    records: str
    text_documents: str
    weight: float = 1

    @property
    def sizes(self) -> list[int]:
        """Bytes of each file; 0 where there is no file."""
        return [_size(file.path) for file in self.files]

    def share(self, position: tuple[int, tuple[int, int]] | None) -> float | None:
        """Which share of the bytes lies before a position; None where that is not known."""
        sizes = self.sizes
        if position is None or not sum(sizes):
            return None
        number, (at, _) = position
        within = 0
        if number < len(self.files):
            kind = self.files[number].format
            counts_bytes = kind == "jsonl" or (kind == "text" and self.text_documents == "file")
            within = min(at, sizes[number]) if counts_bytes else 0
        return (sum(sizes[:number]) + within) / sum(sizes)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0


_SOURCE_KEYS = ("path", "weight", "format", "records", "text_documents")


def list_sources(value: object, key: str, settings: dict[str, str], notes: Notes) -> list[SourceFiles]:
    """The sources that a config key names: one path, or a list (or a mapping by name) of `{path, weight, …}`.

    Args:
        value: what stands in the config.
        key: `data.train` or `data.eval`.
        settings: format, records and text_documents of sources that name none of their own.
        notes: see `find_sources`.

    Raises:
        UserError: see `find_sources`; or an entry without a path, or with a key that is not known.
    """
    if isinstance(value, str):
        return [SourceFiles(value, key, find_sources(value, key, settings["format"], notes), **_reading(settings))]
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value, 1))
    if not entries:
        raise UserError(f"{key}: names no source")
    found = []
    for name, entry in entries:
        where = f"{key}[{name}]"
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise UserError(f"{where}: must be a path, or a mapping with path (and weight)")
        unknown = sorted(set(entry) - set(_SOURCE_KEYS))
        if unknown:
            raise UserError(f"{where}: there is no {', '.join(unknown)}; here are {', '.join(_SOURCE_KEYS)}")
        own = {name: str(entry.get(name, settings[name])) for name in ("format", "records", "text_documents")}
        files = find_sources(entry["path"], where, own["format"], notes)
        found.append(SourceFiles(str(name), where, files, weight=entry.get("weight", 1), **_reading(own)))
    return found


def _reading(settings: dict[str, str]) -> dict[str, str]:
    return {name: settings[name] for name in ("format", "records", "text_documents")}
