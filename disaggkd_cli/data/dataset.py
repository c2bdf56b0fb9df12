"""Sequences ready to be trained on, in flat arrays, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from disaggkd_cli.data.batch import Sequence
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.order import permutation
from disaggkd_cli.data.packing import one_per_row, pack
from disaggkd_cli.data.tokenized import TokenizedDocuments

_FINGERPRINT_VERSION = 1


@dataclass(frozen=True, eq=False)
class TokenizedDataset:
    """N sequences in flat arrays. Immutable; `sequence(i)` is a view of it."""

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

    def __len__(self) -> int:
        return len(self.sequence_ends)

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return len(self.input_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self.sequence_ends, prepend=0).max())

    def sequence(self, index: int) -> Sequence:
        """Sequence `index` (0 … N - 1)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self.sequence_ends[index - 1]) if index else 0
        end = int(self.sequence_ends[index])
        lengths = self.document_lengths[self.documents_before[index] : self.documents_before[index + 1]]
        return Sequence(self.input_ids[start:end], self.labels[start:end], tuple(lengths.tolist()))


def lay_out(
    documents: TokenizedDocuments, key: str, settings: dict[str, Any], notes: Notes, shuffle_seed: int | None = None
) -> TokenizedDataset:
    """Rows of at most settings["sequence_length"] tokens, packed if settings["pack"]; none without a supervised token.

    With `shuffle_seed` the rows are shuffled once and for all, so that the first n of them are a fair sample.
    """
    length = settings["sequence_length"]
    rows = pack(documents, length) if settings["pack"] else one_per_row(documents, length)
    counts = np.add.reduceat(rows.pieces.supervised_counts, rows.pieces_before[:-1])
    which = np.flatnonzero(counts)
    if shuffle_seed is not None:
        which = which[permutation(len(which), shuffle_seed, 0, purpose="evaluation")]
    per_row = np.diff(rows.pieces_before)[which]
    before = np.concatenate([[0], np.cumsum(per_row)])
    order = np.repeat(rows.pieces_before[:-1][which] - before[:-1], per_row) + np.arange(before[-1])
    pieces = rows.pieces.select(order)
    sequence_ends = pieces.ends[before[1:] - 1]
    supervised = counts[which].astype(np.int32)
    notes.add(
        f"{key}: {len(which)} sequences, {len(documents)} documents, {len(pieces.input_ids)} tokens, "
        f"{supervised.sum()} of them supervised"
    )
    document_lengths = pieces.lengths.astype(np.int32)
    fingerprint = _fingerprint([pieces.input_ids, pieces.labels, sequence_ends, document_lengths], settings)
    return TokenizedDataset(
        pieces.input_ids, pieces.labels, sequence_ends, document_lengths, before, supervised, fingerprint, notes.lines()
    )


def _fingerprint(arrays: list[np.ndarray], settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([_FINGERPRINT_VERSION, settings], sort_keys=True).encode())
    for array in arrays:
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
    return digest.hexdigest()
