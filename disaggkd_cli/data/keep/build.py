"""Build the splits by way of the cache: tokens of each source once, and of them the sequences of each setting once."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from disaggkd_cli.data.keep.cache import Cache, Lock, replace_directory
from disaggkd_cli.data.keep.dataset_directory import DatasetDirectory
from disaggkd_cli.data.keep.shards import TokenFiles
from disaggkd_cli.data.layout.assembly import Assembly
from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.finding import Source
from disaggkd_cli.data.read.hub import load_hub
from disaggkd_cli.data.read.source_files import SourceFiles
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.data.tokenise.token_batches import tokenise
from disaggkd_cli.errors import RunError

_SPLITS = ("train", "evaluation")


@dataclass(frozen=True)
class CachedBuild:
    """Splits out of one cache."""

    cache: Cache
    encoder: DocumentEncoder
    tokenizer_fingerprint: str
    workers: int

    def splits(self, assembly: Assembly, notes: Notes) -> tuple[TokenizedDataset, TokenizedDataset]:
        """(sequences to train on, held-out sequences), mapped from files; built first where they are not there.

        Raises:
            UserError: see `load_splits`; the disk is full.
            RunError: another process that builds the same gives no sign of life, or the disk keeps nothing rightly.
        """
        facts = {
            "sources": [self._facts(source) for source in assembly.sources],
            "trained on": len(assembly.train),
            "fraction": None if isinstance(assembly.evaluation, list) else assembly.evaluation,
            "settings": assembly.settings,
            "seed": assembly.seed,
        }
        entry = self.cache.entry("sequences", facts)
        what = "laying out sequences"
        damaged = None
        if entry.exists() and not (damaged := _damage(entry)):
            return _open(entry)

        def is_ready() -> bool:
            return damaged is None and _is_whole(entry)

        with self.cache.locked(entry, what, is_ready) as lock, self.cache.told_when_full():
            if entry.exists() and (damaged := _damage(entry)):
                notes.add(f"data.cache: {entry} was damaged ({damaged}) and is built anew")
            if lock is not None and not (entry.exists() and damaged is None):
                self._build(entry, assembly, lock, what, notes)
        return _open(entry)

    def _build(self, entry: Path, assembly: Assembly, lock: Lock, what: str, notes: Notes) -> None:
        for left_over in entry.parent.glob(f"{entry.name}.*.part"):
            shutil.rmtree(left_over)
        beside = entry.with_name(f"{entry.name}.{os.getpid()}.part")
        directories = [DatasetDirectory(beside / split) for split in _SPLITS]

        def tokens_of(source: SourceFiles, source_notes: Notes) -> TokenizedDocuments:
            documents, noticed = self._tokens(source, notes, lock)
            source_notes.merge(noticed)
            lock.sign(what, len(documents), None)
            return documents

        try:
            datasets = assembly.splits(tokens_of, *(directory.allocate for directory in directories))
            for directory, dataset in zip(directories, datasets, strict=True):
                lock.sign(what, len(dataset), None)
                directory.seal(dataset)
            replace_directory(beside, entry)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _tokens(self, source: SourceFiles, notes: Notes, outer: Lock) -> tuple[TokenizedDocuments, Notes]:
        """The documents of a source, mapped, and what was noticed in them."""
        entry = self.cache.entry("tokens", self._facts(source))
        files = TokenFiles(entry)
        what = f"tokenising {source.key}"
        for _ in range(2):
            if not files.is_complete():
                with self.cache.locked(entry, what, files.is_complete, outer) as lock:
                    if lock is not None and not files.is_complete():
                        if (entry / "complete.json").exists():
                            notes.add(f"data.cache: {entry} was damaged (files of wrong sizes) and is built anew")
                            shutil.rmtree(entry)
                        self._tokenise(source, files, what, lock, outer)
            damaged = files.damage()
            if damaged is None:
                return files.open()
            with self.cache.locked(entry, what, lambda: False, outer):
                if files.damage() is not None:
                    notes.add(f"data.cache: {entry} was damaged ({damaged}) and is built anew")
                    shutil.rmtree(entry)
        raise RunError(f"data.cache: {entry} was damaged again as soon as it was built: is the disk sound?")

    def _tokenise(self, source: SourceFiles, files: TokenFiles, what: str, lock: Lock, outer: Lock) -> None:
        with files.begin() as writer:
            end = (len(source.files), (0, 0))
            if writer.following != end:
                for batch in tokenise(source, self.encoder, writer.following, self.workers):
                    writer.add(batch)
                    lock.sign(what, writer.documents, batch.share)
                    outer.sign("", writer.documents, batch.share)
            writer.finish(end)

    def _facts(self, source: SourceFiles) -> dict[str, Any]:
        """All that decides the tokens of a source. A file counts as the same while path, size and time are."""
        return {
            "code": _code(),
            "libraries": _versions(),
            "tokenizer": self.tokenizer_fingerprint,
            "chat template": [self.encoder.chat_template, self.encoder.template_arguments],
            "read as": [
                source.key,
                source.format,
                source.records,
                source.text_documents,
                dict(source.columns),
                source.prompts,
            ],
            "files": [[file.format, file.split, file.config, *_identity(file)] for file in source.files],
        }


def _identity(source: Source) -> list[Any]:
    path = source.path
    if source.format == "hub":
        files = sorted(file["filename"] for file in load_hub(str(path), source.config, source.split).cache_files)
        return [str(path), [[file, *_state(Path(file))] for file in files]]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return [str(path.resolve()), [[str(file.relative_to(path)), *_state(file)] for file in inside]]
    return [str(path.resolve()), *_state(path)] if path.exists() else [str(path)]


def _state(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


@lru_cache(maxsize=1)
def _code() -> str:
    """A hash of all the code that makes sequences of texts: entries of other versions are not taken for this one's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> list[str]:
    import tokenizers
    import transformers

    return [tokenizers.__version__, transformers.__version__, sys.version.split()[0]]


def _is_whole(entry: Path) -> bool:
    return all((entry / split / "manifest.json").is_file() for split in _SPLITS)


def _damage(entry: Path) -> str | None:
    for split in _SPLITS:
        if reason := DatasetDirectory(entry / split).damage():
            return f"{split}: {reason}"
    return None


def _open(entry: Path) -> tuple[TokenizedDataset, TokenizedDataset]:
    train, evaluation = (DatasetDirectory(entry / split).open() for split in _SPLITS)
    return train, evaluation
