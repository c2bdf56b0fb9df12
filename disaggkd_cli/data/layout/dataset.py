"""Sequences ready to be trained on, in flat arrays, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments
from disaggkd_cli.data.layout.micro_batch import Sequence
from disaggkd_cli.data.layout.rows import Rows, one_per_row, pack
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.order.positions import StreamOrder
from disaggkd_cli.data.order.shuffle import permutation
from disaggkd_cli.data.order.training_texts import IndexedBatch

ARRAYS = ("input_ids", "labels", "sequence_ends", "document_lengths", "documents_before", "supervised_counts")
"""The arrays of a TokenizedDataset."""
_FINGERPRINT_VERSION = 1

Allocate = Callable[[str, int, Any], np.ndarray]
"""(name, size, dtype) → a flat array to be filled, in memory or in a file."""


@dataclass(frozen=True, eq=False)
class TokenizedDataset:
    """N sequences in flat arrays, in memory or mapped from files. Immutable; `sequence(i)` is a view of it."""

    input_ids: np.ndarray
    """[T] int32."""
    labels: np.ndarray
    """[T] int32 next-token labels; -100 = not supervised."""
    sequence_ends: np.ndarray
    """[N] int64: where in the arrays each sequence ends."""
    document_lengths: np.ndarray
    """[P] int32 tokens of each document (or piece of one), in order."""
    documents_before: np.ndarray
    """[N + 1] int64: sequence i holds the documents documents_before[i] … documents_before[i + 1] - 1."""
    supervised_counts: np.ndarray
    """[N] int32 supervised tokens of each sequence; at least 1."""
    fingerprint: str
    """sha256 (hex) over all of the above and the settings that made it."""
    notes: list[str]
    """What the user should know: documents left out or cut, what was held out."""
    source_sizes: tuple[int, ...] = ()
    """Sequences of each source, which stand one source after the other; empty where there is one source alone."""
    weights: tuple[int, ...] = ()
    """Sequences drawn of each source in each round of the mixture; empty where there is one source alone."""
    names: tuple[str, ...] = ()
    """What the user calls each source; empty where there is one source alone."""
    length_bucketing: bool = False
    """Whether batches are made of sequences of similar lengths."""

    def __len__(self) -> int:
        return len(self.sequence_ends)

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return len(self.input_ids)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64 tokens of each sequence."""
        return np.diff(self.sequence_ends, prepend=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    def sequence(self, index: int) -> Sequence:
        """Sequence `index` (0 … N - 1)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self.sequence_ends[index - 1]) if index else 0
        end = int(self.sequence_ends[index])
        lengths = self.document_lengths[self.documents_before[index] : self.documents_before[index + 1]]
        return Sequence(self.input_ids[start:end], self.labels[start:end], tuple(lengths.tolist()))

    def select(self, which: np.ndarray) -> TokenizedDataset:
        """Some of the sequences, [M] ascending indices, copied; the fingerprint names them."""
        lengths, pieces = self.lengths, np.diff(self.documents_before)
        tokens, documents = np.zeros(len(self), bool), np.zeros(len(self), bool)
        tokens[which] = documents[which] = True
        in_tokens, in_documents = np.repeat(tokens, lengths), np.repeat(documents, pieces)
        source = np.repeat(np.arange(len(self.source_sizes)), self.source_sizes)[which] if self.source_sizes else which
        digest = hashlib.sha256(self.fingerprint.encode() + np.ascontiguousarray(which, "<i8").tobytes())
        return replace(
            self,
            input_ids=self.input_ids[in_tokens],
            labels=self.labels[in_tokens],
            sequence_ends=np.cumsum(lengths[which]),
            document_lengths=self.document_lengths[in_documents],
            documents_before=np.concatenate([[0], np.cumsum(pieces[which])]),
            supervised_counts=self.supervised_counts[which],
            fingerprint=digest.hexdigest(),
            source_sizes=tuple(np.bincount(source, minlength=len(self.source_sizes)).tolist())
            if self.source_sizes
            else (),
        )

    def verify(self, check: Callable[[np.ndarray, np.ndarray], Any]) -> None:
        """Call `check` with all token ids and labels; it raises where they may not be used."""
        check(self.input_ids, self.labels)

    @property
    def sample(self) -> TokenizedDataset:
        """All of it: see `TrainingTexts`."""
        return self

    @property
    def whole(self) -> TokenizedDataset:
        """All of it: see `TrainingTexts`."""
        return self

    def batches(self, seed: int, size: int, first_step: int) -> Iterator[IndexedBatch]:
        """Yield the batches of `size` sequences of steps first_step, first_step + 1, …, without end."""
        order = StreamOrder(self, seed, size)
        step = first_step
        while True:
            yield IndexedBatch(self, order.indices(step * size, size))
            step += 1

    def remember_in(self, directory: Path, *, write: bool) -> None:
        """Nothing: any step's sequences are known at once."""


def in_memory(_name: str, size: int, dtype: Any) -> np.ndarray:
    """An array in memory."""
    return np.empty(size, dtype)


@dataclass(frozen=True)
class _Chosen:
    """The rows of one source that have a supervised token."""

    rows: Rows
    which: np.ndarray
    """[N] indices of the rows."""
    supervised: np.ndarray
    """[N] supervised tokens of each."""


def lay_out(
    sources: list[TokenizedDocuments],
    key: str,
    settings: dict[str, Any],
    notes: Notes,
    shuffle_seed: int | None = None,
    allocate: Allocate = in_memory,
) -> TokenizedDataset:
    """Rows of at most settings["sequence_length"] tokens, packed if settings["pack"]; none without a supervised token.

    Sources are laid out apart, so that no row holds documents of two, and stand one after the other. With
    `shuffle_seed` the rows of all are shuffled once and for all, so that the first n of them are a fair sample.
    """
    chosen = [_choose(documents, settings, key, notes) for documents in sources]
    sizes = [len(each.which) for each in chosen]
    source_of = np.repeat(np.arange(len(chosen)), sizes)
    row_of = np.concatenate([each.which for each in chosen])
    supervised = np.concatenate([each.supervised for each in chosen]).astype(np.int32)
    if shuffle_seed is not None:
        order = permutation(len(row_of), shuffle_seed, 0, purpose="evaluation")
        source_of, row_of, supervised = source_of[order], row_of[order], supervised[order]
    runs = np.flatnonzero(np.diff(source_of, prepend=-1))
    parts = [
        _pieces_of_rows(chosen[source_of[first]].rows, row_of[first:last])
        for first, last in zip(runs.tolist(), [*runs[1:].tolist(), len(row_of)], strict=True)
    ]
    per_row = np.concatenate([count for _, count in parts])
    lengths = np.concatenate([pieces.lengths for pieces, _ in parts])
    before = np.concatenate([[0], np.cumsum(per_row)])
    arrays = {
        "sequence_ends": np.cumsum(lengths)[before[1:] - 1],
        "document_lengths": lengths.astype(np.int32),
        "documents_before": before.astype(np.int64),
        "supervised_counts": supervised,
    }
    for name, array in arrays.items():
        arrays[name] = allocate(name, len(array), array.dtype)
        arrays[name][:] = array
    tokens = int(lengths.sum())
    arrays |= {name: allocate(name, tokens, np.int32) for name in ("input_ids", "labels")}
    at = 0
    for pieces, _ in parts:
        for ids, labels in pieces.blocks():
            arrays["input_ids"][at : at + len(ids)] = ids
            arrays["labels"][at : at + len(ids)] = labels
            at += len(ids)
    notes.add(
        f"{key}: {len(row_of)} sequences, {sum(map(len, sources))} documents, {tokens} tokens, "
        f"{supervised.sum()} of them supervised"
    )
    fingerprint = _fingerprint(
        [arrays[name] for name in ("input_ids", "labels", "sequence_ends", "document_lengths")], settings
    )
    return TokenizedDataset(
        **arrays,
        fingerprint=fingerprint,
        notes=notes.lines(),
        source_sizes=tuple(sizes) if len(sizes) > 1 and shuffle_seed is None else (),
    )


def _choose(documents: TokenizedDocuments, settings: dict[str, Any], key: str, notes: Notes) -> _Chosen:
    length = settings["sequence_length"]
    rows = pack(documents, length) if settings["pack"] else one_per_row(documents, length)
    counts = np.add.reduceat(rows.pieces.supervised_counts, rows.pieces_before[:-1])
    which = np.flatnonzero(counts)
    if len(which) < len(counts):
        lost = rows.pieces.lengths[np.repeat(counts == 0, np.diff(rows.pieces_before))].sum()
        notes.add(
            f"{key}: WARNING, {len(counts) - len(which)} sequences ({lost} tokens) are LEFT OUT, since the cut at "
            f"data.sequence_length={length} has left no supervised token in them"
        )
    return _Chosen(rows, which, counts[which])


def _pieces_of_rows(rows: Rows, which: np.ndarray) -> tuple[TokenizedDocuments, np.ndarray]:
    """The pieces of some rows, in order, and how many each row has."""
    per_row = np.diff(rows.pieces_before)[which]
    before = np.concatenate([[0], np.cumsum(per_row)])
    order = np.repeat(rows.pieces_before[:-1][which] - before[:-1], per_row) + np.arange(before[-1])
    return rows.pieces.select(order), per_row


def _fingerprint(arrays: list[np.ndarray], settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([_FINGERPRINT_VERSION, settings], sort_keys=True).encode())
    for array in arrays:
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
    return digest.hexdigest()
