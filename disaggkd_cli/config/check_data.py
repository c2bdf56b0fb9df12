"""What the `data` section must satisfy beyond its types."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.config.schema import CHOICES
from disaggkd_cli.config.source_names import (
    BUILTIN_DATA,
    HELD_OUT_SPLIT,
    RECORD_FIELDS,
    SOURCE_KEYS,
    entries_of,
    is_hub_name,
)
from disaggkd_cli.config.texts import DataConfig


def data_values(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong with the values, whatever there is on the disk."""
    if data.sequence_length == 1:
        yield "data.sequence_length: 1 leaves no next token to learn; it must be at least 2"
    if data.eval_sequences is not None and data.eval_sequences < 1:
        yield f"data.eval_sequences: {data.eval_sequences} must be at least 1, or null for all"
    held_out = data.eval
    is_fraction = isinstance(held_out, (int, float)) and not isinstance(held_out, bool)
    if not is_fraction and not isinstance(held_out, (str, list, dict)):
        yield f"data.eval: {held_out!r} must be a path, split, or the fraction of documents to hold out"
    elif is_fraction and not 0 < held_out < 1:
        yield f"data.eval: {held_out} must be a fraction between 0 and 1, or a path, or split"
    elif is_fraction and data.streaming:
        yield (
            "data.eval: a stream is not read to its end before training, so no fraction of it can be held out; name "
            "a file of its own, or set data.streaming=false"
        )
    workers = data.workers
    if workers != "auto" and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        yield f"data.workers: {workers!r} must be auto or a number of processes, at least 1"
    if data.shuffle_tokens < 1:
        yield f"data.shuffle_tokens: {data.shuffle_tokens} must be at least 1"
    yield from _columns("data.columns", data.columns)
    if not isinstance(data.template_arguments, dict):
        yield f"data.template_arguments: {data.template_arguments!r} must be a mapping, as {{enable_thinking: false}}"
    yield from _sources("data.train", data.train)
    if isinstance(held_out, (list, dict)):
        yield from _sources("data.eval", held_out)


def _columns(key: str, columns: Any) -> Iterator[str]:
    if not isinstance(columns, dict):
        yield f"{key}: {columns!r} must be a mapping, for instance {{prompt: question, completion: answer}}"
        return
    for name, column in columns.items():
        if name not in RECORD_FIELDS:
            near = difflib.get_close_matches(str(name), RECORD_FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECORD_FIELDS)}"
            yield f"{key}.{name}: no record has such a field; {hint}"
        if not isinstance(column, str):
            yield f"{key}.{name}: {column!r} must be the name of a column"


def data_paths(data: DataConfig) -> Iterator[str]:
    """Yield which paths are missing, of those that a run needs."""
    if not data.train:
        yield "data.train: is required: a file, directory or glob of texts, or builtin:pydoc"
    held_out = "" if data.eval == HELD_OUT_SPLIT else data.eval
    for key, path, on_hub in (*_source_paths("data.train", data.train), *_source_paths("data.eval", held_out)):
        if not on_hub:
            yield from _missing(key, path)
    if data.chat_template:
        yield from _missing("data.chat_template", data.chat_template)


def _source_paths(key: str, value: Any) -> list[tuple[str, str, bool]]:
    """(key, path, whether it is said to be a data set's name) of each source, as far as it has one."""
    if isinstance(value, str):
        return [(key, value, False)] if value else []
    found = []
    for name, entry in entries_of(value):
        path = entry if isinstance(entry, str) else _get(entry, "path")
        if isinstance(path, str):
            on_hub = _get(entry, "format") == "hub" or bool(_get(entry, "config"))
            found.append((f"{key}[{name}]" if name != "" else key, path, on_hub))
    return found


def _get(entry: Any, key: str) -> Any:
    return entry.get(key) if isinstance(entry, dict) else None


def _sources(where: str, train: Any) -> Iterator[str]:
    if isinstance(train, str) or train is None:
        return
    if not isinstance(train, (list, dict)):
        yield f"{where}: {train!r} must be a path, or a list or mapping of sources with path and weight"
    for name, entry in entries_of(train):
        key = f"{where}[{name}]" if name != "" else where
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
        yield from _columns(f"{key}.columns", entry.get("columns") or {})
        for word in ("split", "config"):
            if entry.get(word) is not None and not isinstance(entry[word], str):
                yield f"{key}.{word}: {entry[word]!r} must be a name"
        for word in ("format", "records", "text_documents"):
            if word in entry and entry[word] not in CHOICES[f"data.{word}"]:
                yield f"{key}.{word}: {entry[word]!r} is not known; there are {', '.join(CHOICES[f'data.{word}'])}"


def _missing(key: str, source: str) -> Iterator[str]:
    if source.startswith("builtin:"):
        if source not in BUILTIN_DATA:
            yield f"{key}: {source} is not known; there is {', '.join(BUILTIN_DATA)}"
        return
    path = Path(source).expanduser()
    if is_hub_name(source):
        return
    if not path.exists() and not glob.glob(str(path), recursive=True):
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        yield f"{key}: {source} does not exist" + (f"; did you mean {path.parent / near[0]}?" if near else "")
