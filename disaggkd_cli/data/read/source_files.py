"""The sources that `data.train` or `data.eval` names: their files, and how each is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disaggkd_cli.config.source_names import SOURCE_KEYS, entries_of
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.compressed import COMPRESSED
from disaggkd_cli.data.read.finding import Source, Wanted, find_sources
from disaggkd_cli.data.read.records import RecordForm
from disaggkd_cli.errors import UserError

_READING = ("format", "records", "text_documents", "columns")


@dataclass(frozen=True)
class SourceFiles:
    """One source: its files, and how they are read."""

    name: str
    """The path as the user wrote it, or the source's name in the config."""
    key: str
    """The config key, for messages."""
    files: list[Source]
    format: str
    records: str
    text_documents: str
    weight: float = 1
    columns: Mapping[str, str] = field(default_factory=dict)
    prompts: bool = False
    """Whether prompts may stand alone in it."""

    @property
    def form(self) -> RecordForm:
        """How its records are read."""
        return RecordForm(self.records, dict(self.columns), self.prompts)

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
            file = self.files[number]
            counts_bytes = file.format == "jsonl" or (file.format == "text" and self.text_documents == "file")
            if counts_bytes and file.path.suffix.lower() not in COMPRESSED:
                within = min(at, sizes[number])
        return (sum(sizes[:number]) + within) / sum(sizes)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0


def list_sources(
    value: object, key: str, settings: Mapping[str, Any], notes: Notes, *, held_out: bool = False
) -> list[SourceFiles]:
    """The sources that a config key names: one path, one `{path, …}`, or a list (or a mapping by name) of those.

    Args:
        value: what stands in the config.
        key: `data.train` or `data.eval`.
        settings: format, records, text_documents and columns of sources that name none of their own.
        notes: see `find_sources`.
        held_out: whether they are to be evaluated on; see `Wanted`.

    Raises:
        UserError: see `find_sources`; or an entry without a path, or with a key that is not known.
    """
    if isinstance(value, str):
        return [_source(value, key, {"path": value}, settings, notes, held_out)]
    entries = entries_of(value)
    if not entries:
        raise UserError(f"{key}: names no source")
    found = []
    for name, entry in entries:
        where = f"{key}[{name}]" if name != "" else key
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise UserError(f"{where}: must be a path, or a mapping with path (and weight)")
        unknown = sorted(set(entry) - set(SOURCE_KEYS))
        if unknown:
            raise UserError(f"{where}: there is no {', '.join(unknown)}; here are {', '.join(SOURCE_KEYS)}")
        found.append(_source(str(name) or entry["path"], where, entry, settings, notes, held_out))
    return found


def _source(
    name: str, key: str, entry: Mapping[str, Any], settings: Mapping[str, Any], notes: Notes, held_out: bool
) -> SourceFiles:
    own = {word: entry.get(word, settings.get(word)) for word in _READING}
    wanted = Wanted(
        entry["path"], key, own["format"], entry.get("split"), entry.get("config"), held_out and "split" not in entry
    )
    files = find_sources(wanted, notes)
    return SourceFiles(
        name,
        key,
        files,
        own["format"],
        own["records"],
        own["text_documents"],
        entry.get("weight", 1),
        own["columns"] or {},
    )


def held_out_beside(value: object, settings: Mapping[str, Any], notes: Notes) -> list[SourceFiles]:
    """The held-out split of each source of `data.train` that has one, for `data.eval: split`.

    Raises:
        UserError: no source has one.
    """
    entries = [("", {"path": value})] if isinstance(value, str) else entries_of(value)
    found = []
    for name, entry in entries:
        entry = {"path": entry} if isinstance(entry, str) else dict(entry)
        entry.pop("split", None)
        entry.pop("weight", None)
        where = f"data.eval[{name}]" if name != "" else "data.eval"
        trained = {file for source in list_sources({**entry}, where, settings, Notes()) for file in source.files}
        try:
            source = _source(str(name) or entry["path"], where, entry, settings, notes, held_out=True)
        except UserError as error:
            notes.add(f"{where}: no held-out split is taken of {entry['path']} ({error})")
            continue
        if trained.isdisjoint(source.files):
            found.append(source)
        else:
            notes.add(f"{where}: {entry['path']} has no held-out split")
    if not found:
        raise UserError(
            "data.eval=split: no source of data.train has a held-out split (files or folders named validation, valid, "
            "val, dev, eval or test beside the training texts, or such a split of a data set); name a path, or a "
            "fraction"
        )
    return found
