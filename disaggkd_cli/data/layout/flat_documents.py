"""Many tokenised documents as ranges of two flat arrays, which may lie on disk: choosing and cutting copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from disaggkd_cli.data.layout.micro_batch import IGNORE
from disaggkd_cli.data.tokenise.encoding import EncodedDocument

_TOKENS_AT_ONCE = 1 << 20


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class TokenizedDocuments:
    """D documents, each a range of the flat arrays; ranges do not overlap."""

    flat_ids: np.ndarray
    """[F] int32 token ids of all documents, and maybe of others."""
    flat_labels: np.ndarray
    """[F] int32 next-token labels within the document; -100 = not supervised, and at each document's last token."""
    begins: np.ndarray
    """[D] int64: where in the flat arrays each document begins."""
    stops: np.ndarray
    """[D] int64: where it stops."""
    is_text: np.ndarray
    """[D] bool: running text, which may be cut anywhere."""
    unlabelled: np.ndarray = field(default_factory=_none)
    """[U] int64, ascending: places in the flat arrays whose label does not count here, whatever the arrays say."""

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def lengths(self) -> np.ndarray:
        """[D] int64 tokens of each document."""
        return self.stops - self.begins

    @property
    def ends(self) -> np.ndarray:
        """[D] int64: where each document ends when they are laid end to end."""
        return np.cumsum(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """[D] int64: where each document starts when they are laid end to end."""
        return self.ends - self.lengths

    @property
    def token_count(self) -> int:
        """T, tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def input_ids(self) -> np.ndarray:
        """[T] int32 token ids of the documents laid end to end: a copy."""
        return np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in self.blocks())])

    @property
    def labels(self) -> np.ndarray:
        """[T] int32 labels of the documents laid end to end: a copy."""
        return np.concatenate([np.empty(0, np.int32), *(labels for _, labels in self.blocks())])

    @property
    def supervised_counts(self) -> np.ndarray:
        """[D] int64 tokens of each document that have a label."""
        counts = np.zeros(len(self), np.int64)
        order = np.argsort(self.begins, kind="stable")
        begins, stops = self.begins[order], self.stops[order]
        at = 0
        while at < len(order):
            first = begins[at]
            after = max(at + 1, int(np.searchsorted(stops, first + _TOKENS_AT_ONCE, "right")))
            counted = self._labels(int(first), int(stops[after - 1])) != IGNORE
            total = np.concatenate([[0], np.cumsum(counted)])
            counts[order[at:after]] = total[stops[at:after] - first] - total[begins[at:after] - first]
            at = after
        return counts

    def blocks(self, tokens: int = _TOKENS_AT_ONCE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the documents laid end to end, as (ids, labels) of at most `tokens` tokens each."""
        if not len(self):
            return
        jumps = np.flatnonzero(self.begins[1:] != self.stops[:-1])
        firsts = self.begins[np.concatenate([[0], jumps + 1])].tolist()
        lasts = self.stops[np.concatenate([jumps, [len(self) - 1]])].tolist()
        waiting: list[tuple[int, int]] = []
        room = tokens
        for first, last in zip(firsts, lasts, strict=True):
            while first < last:
                taken = min(room, last - first)
                waiting.append((first, first + taken))
                first, room = first + taken, room - taken
                if not room:
                    yield self._block(waiting)
                    waiting, room = [], tokens
        if waiting:
            yield self._block(waiting)

    def _block(self, ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.concatenate([self.flat_ids[first:last] for first, last in ranges])
        return ids, np.concatenate([self._labels(first, last) for first, last in ranges])

    def _labels(self, first: int, last: int) -> np.ndarray:
        labels = self.flat_labels[first:last]
        inside = self.unlabelled[np.searchsorted(self.unlabelled, first) : np.searchsorted(self.unlabelled, last)]
        if len(inside):
            labels = labels.copy()
            labels[inside - first] = IGNORE
        return labels

    def pieces(
        self, begins: np.ndarray, stops: np.ndarray, is_text: np.ndarray, unlabelled: np.ndarray | None = None
    ) -> TokenizedDocuments:
        """Documents made of the ranges [begin, stop) of the flat arrays, in the given order."""
        if unlabelled is None:
            unlabelled = self.unlabelled
        return TokenizedDocuments(self.flat_ids, self.flat_labels, begins, stops, is_text, unlabelled)

    def select(self, which: np.ndarray) -> TokenizedDocuments:
        """Some of the documents: `which` is [D] bool or indices."""
        return self.pieces(self.begins[which], self.stops[which], self.is_text[which])

    def copied(self) -> TokenizedDocuments:
        """The same documents, in their order, over flat arrays of their own that hold nothing else."""
        return TokenizedDocuments(self.input_ids, self.labels, self.starts, self.ends, self.is_text)


def next_token_labels(input_ids: np.ndarray, supervised: np.ndarray) -> np.ndarray:
    """[L] int32: the token that follows, where that one is supervised; otherwise -100, as at the last token."""
    labels = np.full(len(input_ids), IGNORE, np.int32)
    labels[:-1] = np.where(supervised[1:], input_ids[1:], IGNORE)
    return labels


@dataclass(frozen=True)
class LabelledPiece:
    """A document, or a piece of one, with its labels."""

    input_ids: np.ndarray
    """[L] int32."""
    labels: np.ndarray
    """[L] int32; where the document goes on in the next piece, the last label is that piece's first token."""
    is_text: bool
    continues: bool
    """Whether the document goes on in the next piece."""


def labelled(encoded: Iterable[EncodedDocument]) -> Iterator[LabelledPiece]:
    """Yield each encoded document or piece with its labels, one behind, since a piece's last label is in the next."""
    held: EncodedDocument | None = None
    for document in encoded:
        if held is not None:
            yield _with_labels(held, document)
        held = document
    if held is not None:
        yield _with_labels(held, None)


def _with_labels(document: EncodedDocument, following: EncodedDocument | None) -> LabelledPiece:
    labels = next_token_labels(document.input_ids, document.supervised)
    if document.continues and following is not None and len(labels) and following.supervised[0]:
        labels[-1] = following.input_ids[0]
    return LabelledPiece(document.input_ids, labels, document.is_text, document.continues)


def from_pieces(
    flat_ids: np.ndarray, flat_labels: np.ndarray, lengths: np.ndarray, is_text: np.ndarray, continues: np.ndarray
) -> TokenizedDocuments:
    """Documents from pieces that lie end to end in the flat arrays.

    Args:
        flat_ids, flat_labels: [T] int32.
        lengths: [P] tokens of each piece.
        is_text, continues: [P] bool; see `LabelledPiece`.
    """
    last = ~continues.astype(bool)
    if len(last):
        last[-1] = True
    ends = np.cumsum(lengths, dtype=np.int64)[last]
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
    return TokenizedDocuments(flat_ids, flat_labels, begins, ends, is_text.astype(bool)[last])


def join(documents: Iterable[EncodedDocument]) -> TokenizedDocuments:
    """Encoded documents as flat arrays in memory, with their labels."""
    return join_pieces(labelled(documents))


def join_pieces(pieces: Iterable[LabelledPiece]) -> TokenizedDocuments:
    """Labelled documents and pieces as flat arrays in memory."""
    found = list(pieces)
    return from_pieces(
        np.concatenate([np.empty(0, np.int32), *(piece.input_ids for piece in found)]),
        np.concatenate([np.empty(0, np.int32), *(piece.labels for piece in found)]),
        np.asarray([len(piece.input_ids) for piece in found], np.int64),
        np.asarray([piece.is_text for piece in found], bool),
        np.asarray([piece.continues for piece in found], bool),
    )
