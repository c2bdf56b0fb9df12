"""What the `data` section must satisfy beyond its types."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.config.schema import CHOICES, DataConfig

BUILTIN_DATA = ("builtin:pydoc",)
SOURCE_KEYS = ("path", "weight", "format", "records", "text_documents")


def data_values(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong with the values, whatever there is on the disk."""
    if data.sequence_length == 1:
        yield "data.sequence_length: 1 leaves no next token to learn; it must be at least 2"
    if data.eval_sequences is not None and data.eval_sequences < 1:
        yield f"data.eval_sequences: {data.eval_sequences} must be at least 1, or null for all"
    held_out = data.eval
    if isinstance(held_out, bool) or not isinstance(held_out, (int, float, str)):
        yield f"data.eval: {held_out!r} must be a path, or the fraction of documents to hold out"
    elif not isinstance(held_out, str) and not 0 < held_out < 1:
        yield f"data.eval: {held_out} must be a fraction between 0 and 1, or a path"
    elif not isinstance(held_out, str) and data.streaming:
        yield (
            "data.eval: a stream is not read to its end before training, so no fraction of it can be held out; name "
            "a file of its own, or set data.streaming=false"
        )
    workers = data.workers
    if workers != "auto" and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        yield f"data.workers: {workers!r} must be auto or a number of processes, at least 1"
    if data.shuffle_tokens < 1:
        yield f"data.shuffle_tokens: {data.shuffle_tokens} must be at least 1"
    yield from _sources(data.train)


def data_paths(data: DataConfig) -> Iterator[str]:
    """Yield which paths are missing, of those that a run needs."""
    if not data.train:
        yield "data.train: is required: a file, directory or glob of texts, or builtin:pydoc"
    for key, path in source_paths(data.train):
        yield from _missing(key, path)
    if isinstance(data.eval, str):
        yield from _missing("data.eval", data.eval)
    if data.chat_template:
        yield from _missing("data.chat_template", data.chat_template)


def source_paths(train: Any) -> list[tuple[str, str]]:
    """Return (key, path) of each source of `data.train`, as far as it has one."""
    if isinstance(train, str):
        return [("data.train", train)] if train else []
    paths = ((name, entry if isinstance(entry, str) else _get(entry, "path")) for name, entry in _entries(train))
    return [(f"data.train[{name}]", path) for name, path in paths if isinstance(path, str)]


def _get(entry: Any, key: str) -> Any:
    return entry.get(key) if isinstance(entry, dict) else None


def _entries(train: Any) -> list[tuple[Any, Any]]:
    if isinstance(train, dict):
        return list(train.items())
    return list(enumerate(train, 1)) if isinstance(train, list) else []


def _sources(train: Any) -> Iterator[str]:
    if isinstance(train, str) or train is None:
        return
    if not isinstance(train, (list, dict)):
        yield f"data.train: {train!r} must be a path, or a list or mapping of sources with path and weight"
    for name, entry in _entries(train):
        key = f"data.train[{name}]"
        if isinstance(entry, str):
            continue
        if not isinstance(entry, dict):
            yield f"{key}: {entry!r} must be a path, or a mapping with path and weight"
            continue
        if not isinstance(entry.get("path"), str):
            yield f"{key}.path: is required: a file, directory or glob of texts, or builtin:pydoc"
        for unknown in (name for name in entry if name not in SOURCE_KEYS):
            near = difflib.get_close_matches(unknown, SOURCE_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"here are: {', '.join(SOURCE_KEYS)}"
            yield f"{key}.{unknown}: there is no such key; {hint}"
        weight = entry.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            yield f"{key}.weight: {weight!r} must be a number above 0"
        for word in ("format", "records", "text_documents"):
            if word in entry and entry[word] not in CHOICES[f"data.{word}"]:
                yield f"{key}.{word}: {entry[word]!r} is not known; there are {', '.join(CHOICES[f'data.{word}'])}"


def _missing(key: str, source: str) -> Iterator[str]:
    if source.startswith("builtin:"):
        if source not in BUILTIN_DATA:
            yield f"{key}: {source} is not known; there is {', '.join(BUILTIN_DATA)}"
        return
    path = Path(source).expanduser()
    if not path.exists() and not glob.glob(str(path), recursive=True):
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        yield f"{key}: {source} does not exist" + (f"; did you mean {path.parent / near[0]}?" if near else "")
