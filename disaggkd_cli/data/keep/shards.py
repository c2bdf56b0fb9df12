"""The tokenised documents of one source on disk: flat little-endian files, written shard by shard, mapped when read.

    ids.bin, labels.bin (int32 a token), lengths.bin (int64 a piece), flags.bin (a byte a piece)
    shards.jsonl   a line per finished shard: sizes after it, checksums of what it added, where reading goes on, notes
    complete.json  written last

A shard counts once its line is there, and its line is written once its bytes are on disk; whatever lies behind the last
line is cut off when the writing goes on. Plain files rather than an Arrow table: they are appended to, checked and
mapped as the very arrays that training reads, without a library between.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from disaggkd_cli import files
from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments, from_pieces, next_token_labels
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.tokenise.encoding import EncodedDocument
from disaggkd_cli.data.tokenise.token_batches import BEGINNING, Position, TokenBatch

SHARD_TOKENS = 4 << 20
_DTYPES = {"ids": "<i4", "labels": "<i4", "lengths": "<i8", "flags": "u1"}
_TEXT, _CONTINUES = 1, 2
_BYTES_AT_ONCE = 1 << 20


@dataclass
class _Shard:
    """The state after a finished shard."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DTYPES, 0))
    """Bytes of each file, all shards up to this one together."""
    checksums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DTYPES, 0))
    """CRC-32 of what this shard added to each file."""
    following: Any = BEGINNING
    documents: int = 0
    """Documents read so far."""
    label_awaited: bool = False
    """Whether the last token's label is the next shard's first token."""
    notes: dict[str, list] = field(default_factory=dict)


class TokenFiles:
    """One directory of tokens."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def is_complete(self) -> bool:
        """Whether all of the source is there, as far as sizes tell."""
        try:
            complete = json.loads((self.directory / "complete.json").read_text())
            return all(self._path(name).stat().st_size == size for name, size in complete["bytes"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def open(self) -> tuple[TokenizedDocuments, Notes]:
        """The documents, mapped, and what was noticed while they were made."""
        complete = json.loads((self.directory / "complete.json").read_text())
        flags = self._map("flags")
        documents = from_pieces(
            self._map("ids"), self._map("labels"), self._map("lengths"), flags & _TEXT != 0, flags & _CONTINUES != 0
        )
        return documents, Notes(complete["notes"])

    def damage(self) -> str | None:
        """What is wrong with the bytes on disk; None: nothing."""
        shards = self._shards()
        before = _Shard()
        for number, shard in enumerate(shards, 1):
            for name in _DTYPES:
                with self._path(name).open("rb") as file:
                    if crc_of_range(file, before.bytes[name], shard.bytes[name]) != shard.checksums[name]:
                        return f"{name}.bin differs from its checksum in shard {number} of {len(shards)}"
            before = shard
        if not self.is_complete() or any(self._path(name).stat().st_size != before.bytes[name] for name in _DTYPES):
            return "its list of shards and its files differ"
        return None

    def begin(self) -> Writer:
        """A writer that goes on after the last finished shard."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shards = self._shards()
        self._keep(shards)
        return Writer(self.directory, shards[-1] if shards else _Shard())

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.bin"

    def _map(self, name: str) -> np.ndarray:
        path = self._path(name)
        if path.stat().st_size == 0:
            return np.empty(0, _DTYPES[name])
        return np.memmap(path, _DTYPES[name], "r").view(np.ndarray)

    def _shards(self) -> list[_Shard]:
        """Finished shards, as far as their lines can be read and their bytes are there."""
        found: list[_Shard] = []
        try:
            lines = (self.directory / "shards.jsonl").read_text().splitlines()
            sizes = {name: self._path(name).stat().st_size for name in _DTYPES}
        except (OSError, UnicodeDecodeError):
            return found
        for line in lines:
            try:
                shard = _Shard(**json.loads(line))
                shard.following = (int(shard.following[0]), tuple(map(int, shard.following[1])))
                if any(shard.bytes[name] > sizes[name] for name in _DTYPES):
                    break
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                break
            found.append(shard)
        return found

    def _keep(self, shards: list[_Shard]) -> None:
        """Cut everything back to these first shards."""
        (self.directory / "complete.json").unlink(missing_ok=True)
        last = shards[-1] if shards else _Shard()
        for name in _DTYPES:
            path = self._path(name)
            path.touch()
            os.truncate(path, last.bytes[name])
        lines = "".join(json.dumps(asdict(shard)) + "\n" for shard in shards)
        files.write_text(self.directory / "shards.jsonl", lines, durable=True)


class Writer:
    """Appends batches of documents and finishes shards."""

    def __init__(self, directory: Path, state: _Shard) -> None:
        self._directory = directory
        self._files = {name: (directory / f"{name}.bin").open("ab") for name in _DTYPES}
        self._lines = (directory / "shards.jsonl").open("a")
        self._state = state
        self._checksums = dict.fromkeys(_DTYPES, 0)
        self._bytes = dict(state.bytes)
        self._awaited = state.label_awaited
        self._documents = state.documents
        self._notes = Notes(state.notes)

    @property
    def following(self) -> Position:
        """Where reading goes on."""
        return self._state.following

    @property
    def documents(self) -> int:
        """Documents read so far."""
        return self._documents

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), self._lines):
            try:
                file.close()
            except OSError:  # the disk is full, and has said so when it was written to
                continue

    def add(self, batch: TokenBatch) -> None:
        """Append a batch, and finish the shard if it has become large enough."""
        self._append(batch.documents)
        self._documents += batch.read
        self._notes.merge(batch.notes)
        added = self._bytes["ids"] - self._state.bytes["ids"]
        if batch.following is not None and added >= SHARD_TOKENS * 4:
            self._finish_shard(batch.following)

    def finish(self, following: Position) -> None:
        """Finish the last shard and say that all is there."""
        self._finish_shard(following)
        complete = {"bytes": self._bytes, "documents": self._documents, "notes": self._notes.state()}
        files.write_text(self._directory / "complete.json", json.dumps(complete), durable=True)

    def _append(self, documents: Iterable[EncodedDocument]) -> None:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
        for document in documents:
            ids, labels = document.input_ids, next_token_labels(document.input_ids, document.supervised)
            if self._awaited and len(ids):
                parts["labels"].append(ids[:1])
            if len(ids):
                self._awaited = document.continues
            parts["ids"].append(ids)
            parts["labels"].append(labels[:-1] if document.continues else labels)
            parts["lengths"].append(np.asarray([len(ids)]))
            parts["flags"].append(np.asarray([_TEXT * document.is_text + _CONTINUES * document.continues]))
        for name, arrays in parts.items():
            if arrays:
                data = np.concatenate(arrays).astype(_DTYPES[name]).tobytes()
                self._files[name].write(data)
                self._checksums[name] = zlib.crc32(data, self._checksums[name])
                self._bytes[name] += len(data)

    def _finish_shard(self, following: Position) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._state = _Shard(
            dict(self._bytes), self._checksums, following, self._documents, self._awaited, self._notes.state()
        )
        self._checksums = dict.fromkeys(_DTYPES, 0)
        self._lines.write(json.dumps(asdict(self._state)) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())


def crc_of_range(file: Any, start: int, stop: int) -> int:
    """CRC-32 of the bytes start … stop - 1 of an open file."""
    file.seek(start)
    found = 0
    while start < stop:
        data = file.read(min(_BYTES_AT_ONCE, stop - start))
        if not data:
            return -1
        found = zlib.crc32(data, found)
        start += len(data)
    return found
