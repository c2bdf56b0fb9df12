"""From what the user wrote (a file, a directory, a glob, a data set's name) to the things to read and their format."""

from __future__ import annotations

import difflib
import glob
from dataclasses import dataclass
from pathlib import Path

from disaggkd_cli.config.source_names import BUILTIN_DATA, DATA_FORMATS, FILE_FORMATS, is_hub_name
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.compressed import COMPRESSED, first_bytes
from disaggkd_cli.data.read.hub import hub_splits
from disaggkd_cli.data.read.split_names import (
    files_of_split,
    held_out_files,
    held_out_name,
    require_training_split,
    training_files,
)
from disaggkd_cli.errors import UserError

_FORMAT_OF_SUFFIX = {ending: kind for kind, endings in FILE_FORMATS.items() for ending in endings}
_DATASET_MARKS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Source:
    """One thing to read."""

    path: Path
    format: str
    """text, jsonl, json_array, csv, parquet, arrow, dataset (a directory that `datasets.load_from_disk` reads), hub or
    builtin."""
    split: str | None = None
    """Which split of a data set that has several."""
    config: str | None = None
    """Which configuration of a data set on the Hub."""


@dataclass(frozen=True)
class Wanted:
    """What is looked for."""

    value: str
    """A file, a directory (read with its sub-directories), a glob, the name of a data set on the Hub, or builtin:…"""
    key: str
    """The config key, for messages."""
    format: str = "auto"
    """One of DATA_FORMATS; auto goes by the endings of the names."""
    split: str | None = None
    """Only this split."""
    config: str | None = None
    held_out: bool = False
    """Texts to evaluate on: of several splits the held-out one."""


def find_sources(wanted: Wanted, notes: Notes) -> list[Source]:
    """The things to read, sorted by path; of several splits the one that is wanted, which the notes are told.

    Raises:
        UserError: nothing there, nothing readable, or several formats side by side.
    """
    value, key = wanted.value, wanted.key
    if wanted.format not in DATA_FORMATS:
        raise UserError(f"data.format: {wanted.format} is none of {', '.join(DATA_FORMATS)}")
    if value.startswith("builtin:"):
        if value not in BUILTIN_DATA:
            raise UserError(f"{key}: {value} is not known; there is {', '.join(BUILTIN_DATA)}")
        return [Source(Path(value), "builtin")]
    path = Path(value).expanduser()
    if wanted.format == "hub":
        return [_hub(wanted)]
    if path.is_dir():
        if any((path / mark).is_file() for mark in _DATASET_MARKS):
            if wanted.format not in ("auto", "dataset"):
                raise UserError(f"{key}: {value} is a Hugging Face dataset directory, not data.format={wanted.format}")
            return [_dataset_directory(path, wanted)]
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        files = _readable(files, wanted, notes)
        if not wanted.held_out and wanted.split is None:
            require_training_split(files, path, key)
        return _sources(_of_split(files, path, wanted, notes), wanted)
    if path.exists():
        return _sources([path], wanted)
    files = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]
    if files:
        return _sources(_of_split(files, _fixed_part(path), wanted, notes), wanted)
    if is_hub_name(value) or wanted.config:
        return [_hub(wanted)]
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f" (did you mean {path.parent / near[0]}?)" if near else f" (looked from {Path.cwd()})"
    raise UserError(f"{key}: there is no file, directory or glob match for {value}{hint}")


def format_of(file: Path) -> str | None:
    """The format that a file's ending says, without the ending of a compressed file."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        kind = _FORMAT_OF_SUFFIX.get(suffixes[-2]) if len(suffixes) > 1 else None
        return kind if kind in ("text", "jsonl", "csv") else None
    return _FORMAT_OF_SUFFIX.get(suffixes[-1]) if suffixes else None


def _fixed_part(pattern: Path) -> Path:
    """The part of a glob before its first wild card."""
    base = Path(pattern.anchor)
    for part in pattern.parts[len(base.parts) :]:
        if glob.has_magic(part):
            break
        base /= part
    return base


def _of_split(files: list[Path], base: Path, wanted: Wanted, notes: Notes) -> list[Path]:
    if wanted.split is not None:
        chosen = files_of_split(files, base, wanted.split)
        if not chosen:
            raise UserError(f"{wanted.key}: {wanted.value} holds no file of the split {wanted.split}")
        return chosen
    chosen = (held_out_files(files, base) or files) if wanted.held_out else training_files(files, base)
    for file in sorted(set(files) - set(chosen)):
        notes.add(f"{wanted.key}: {{count}} files of {wanted.value} are of other splits (first: {{first}})", str(file))
    return chosen


def _dataset_directory(path: Path, wanted: Wanted) -> Source:
    names = [] if (path / "state.json").is_file() else dataset_splits(path, wanted.key)
    if not names:
        return Source(path, "dataset")
    split = wanted.split or (held_out_name(names) if wanted.held_out else "train")
    if split not in names:
        raise UserError(
            f"{wanted.key}: {path} has no split {split or 'to hold out'}; name one of {', '.join(names)} with split"
        )
    return Source(path / split, "dataset")


def dataset_splits(path: Path, key: str) -> list[str]:
    """The splits of a directory that `DatasetDict.save_to_disk` wrote."""
    import json

    try:
        return list(json.loads((path / "dataset_dict.json").read_text())["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: {path}/dataset_dict.json can't be read ({error})") from error


def _hub(wanted: Wanted) -> Source:
    split = wanted.split
    if split is None:
        split = "train"
        if wanted.held_out:
            names = hub_splits(wanted.value, wanted.config, wanted.key)
            split = held_out_name(names)
            if split is None:
                raise UserError(
                    f"{wanted.key}: the data set {wanted.value} has no split to hold out; it has {', '.join(names)}"
                )
    return Source(Path(wanted.value), "hub", split, wanted.config)


def _readable(files: list[Path], wanted: Wanted, notes: Notes) -> list[Path]:
    """Of a directory's files those whose ending is known, and of the asked format."""
    accepted = ("parquet", "jsonl", "arrow") if wanted.format == "dataset" else (wanted.format,)
    kinds = {file: format_of(file) for file in files}
    known = [file for file, kind in kinds.items() if kind and (wanted.format == "auto" or kind in accepted)]
    if not known:
        holds = ", ".join(sorted({file.name for file in files})[:5]) or "nothing"
        asked = "" if wanted.format == "auto" else f" of format {wanted.format}"
        raise UserError(
            f"{wanted.key}: the directory {wanted.value} holds no file{asked} that can be read (it holds {holds}). "
            f"Known endings: {', '.join(_FORMAT_OF_SUFFIX)}; text, JSON lines and CSV also with "
            f"{', '.join(COMPRESSED)}; another ending needs data.format and a glob."
        )
    for file in sorted(set(files) - set(known)):
        notes.add(
            f"{wanted.key}: {{count}} files of {wanted.value} were not read, for their ending (first: {{first}})",
            str(file),
        )
    return known


def _sources(files: list[Path], wanted: Wanted) -> list[Source]:
    formats: dict[str, Path] = {}
    sources = []
    for file in files:
        kind = format_of(file)
        if wanted.format not in ("auto", "dataset"):
            kind = wanted.format
        if kind is None:
            raise UserError(
                f"{wanted.key}: the ending of {file} says nothing about its format; set data.format to one of "
                f"{', '.join(FILE_FORMATS)}"
            )
        formats.setdefault(kind, file)
        if kind == "jsonl" and first_bytes(file, wanted.key).lstrip()[:1] == b"[" and file.stat().st_size > 2:
            kind = "json_array"
        sources.append(Source(file, kind))
    if len(formats) > 1:
        examples = ", ".join(f"{kind}: {file.name}" for kind, file in formats.items())
        raise UserError(
            f"{wanted.key}: {wanted.value} holds files of several formats ({examples}); set data.format, or use a glob"
        )
    return sources
