"""Many tokenised documents in a few flat arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disaggkd_cli.data.batch import IGNORE
from disaggkd_cli.data.encoding import EncodedDocument


@dataclass(frozen=True)
class TokenizedDocuments:
    """D documents, one after the other."""

    input_ids: np.ndarray
    """[T] int32."""
    labels: np.ndarray
    """[T] int32 next-token labels within the document; -100 = not supervised, and at each document's last token."""
    ends: np.ndarray
    """[D] int64: where each document ends."""
    is_text: np.ndarray
    """[D] bool: running text, which may be cut anywhere."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """[D] int64 tokens of each document."""
        return np.diff(self.ends, prepend=0)

    @property
    def starts(self) -> np.ndarray:
        """[D] int64: where each document starts."""
        return self.ends - self.lengths

    @property
    def supervised_counts(self) -> np.ndarray:
        """[D] int64 tokens of each document that have a label."""
        total = np.concatenate([[0], np.cumsum(self.labels != IGNORE)])
        return total[self.ends] - total[self.starts]

    def pieces(self, starts: np.ndarray, ends: np.ndarray, is_text: np.ndarray) -> TokenizedDocuments:
        """Documents made of the token ranges [start, end) of this one's arrays, in the given order."""
        return TokenizedDocuments(
            _gather(self.input_ids, starts, ends), _gather(self.labels, starts, ends), np.cumsum(ends - starts), is_text
        )

    def select(self, which: np.ndarray) -> TokenizedDocuments:
        """Some of the documents: `which` is [D] bool or indices."""
        return self.pieces(self.starts[which], self.ends[which], self.is_text[which])


def _gather(flat: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    if not len(starts):
        return flat[:0].copy()
    return np.concatenate([flat[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])


def next_token_labels(input_ids: np.ndarray, supervised: np.ndarray) -> np.ndarray:
    """[L] int32: the token that follows, where that one is supervised; otherwise -100, as at the last token."""
    labels = np.full(len(input_ids), IGNORE, np.int32)
    labels[:-1] = np.where(supervised[1:], input_ids[1:], IGNORE)
    return labels


def join(documents: Iterable[EncodedDocument]) -> TokenizedDocuments:
    """Encoded documents as flat arrays, with their labels."""
    input_ids, labels, is_text = [np.empty(0, np.int32)], [np.empty(0, np.int32)], []
    for document in documents:
        input_ids.append(document.input_ids)
        labels.append(next_token_labels(document.input_ids, document.supervised))
        is_text.append(document.is_text)
    lengths = [len(ids) for ids in input_ids[1:]]
    return TokenizedDocuments(
        np.concatenate(input_ids), np.concatenate(labels), np.cumsum(lengths, dtype=np.int64), np.asarray(is_text, bool)
    )
