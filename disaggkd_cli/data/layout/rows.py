"""Documents → rows of at most `sequence_length` tokens. Nothing is lost, and no label crosses from one document to the
next.

Packed: running text is laid end to end and cut every `sequence_length` tokens, so a text that does not fit into what is
left of a row goes on in the next one; conversations and completions stay whole, if they can, and are fitted together
(best fit, longest first). Not packed: a document a row, a longer text in consecutive rows.

Where a text is cut, the label of the row's last token is still the token that follows in the same text, so how many
tokens are supervised does not depend on where rows end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments

LONG_DOCUMENTS = ("auto", "split", "drop", "error")


@dataclass(frozen=True)
class Rows:
    """N rows of documents."""

    pieces: TokenizedDocuments
    """The documents, or pieces of them, in the order in which they stand in the rows."""
    pieces_before: np.ndarray
    """[N + 1] int64: row i holds the pieces pieces_before[i] … pieces_before[i + 1] - 1."""

    def __len__(self) -> int:
        return len(self.pieces_before) - 1


def cut_consecutively(documents: TokenizedDocuments, sequence_length: int) -> TokenizedDocuments:
    """Cut each document into consecutive pieces of at most `sequence_length` tokens; shorter ones stay as they are."""
    count = -(-documents.lengths // sequence_length)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    begins = np.repeat(documents.begins, count) + within * sequence_length
    stops = np.minimum(begins + sequence_length, np.repeat(documents.stops, count))
    return documents.pieces(begins, stops, np.repeat(documents.is_text, count))


def pack(documents: TokenizedDocuments, sequence_length: int) -> Rows:
    """Pack documents into rows; text first, then what stays whole (if longer than a row, pieces as long as a row)."""
    text = documents.select(documents.is_text)
    pairs = cut_consecutively(documents.select(~documents.is_text), sequence_length)
    stream = _cut_stream(text, sequence_length)
    text_rows = np.flatnonzero(np.diff(stream.starts // sequence_length, prepend=-1))
    bins = best_fit(pairs.lengths, sequence_length)
    fitted = pairs.select(np.asarray([index for members in bins for index in members], np.int64))
    pieces = documents.pieces(
        np.concatenate([stream.begins, fitted.begins]),
        np.concatenate([stream.stops, fitted.stops]),
        np.concatenate([stream.is_text, fitted.is_text]),
    )
    bin_ends = np.cumsum([len(members) for members in bins], dtype=np.int64) + len(stream)
    return Rows(pieces, np.concatenate([text_rows, [len(stream)], bin_ends]).astype(np.int64))


def one_per_row(documents: TokenizedDocuments, sequence_length: int) -> Rows:
    """A document a row; longer texts in consecutive rows."""
    pieces = cut_consecutively(documents, sequence_length)
    return Rows(pieces, np.arange(len(pieces) + 1))


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of indices with sum of lengths ≤ capacity: longest first, each into the fullest bin that still has room.

    Raises:
        ValueError: a length above the capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a document of {lengths.max()} tokens in rows of {capacity}")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            left, target = capacity, len(bins)
            bins.append([])
        else:
            left, target = room.pop(at)
        bins[target].append(index)
        if left > length:
            insort(room, (left - length, target))
    return bins


def _cut_stream(text: TokenizedDocuments, sequence_length: int) -> TokenizedDocuments:
    """Cut the documents, laid end to end, where one ends and where a row ends."""
    document_ends, total = text.ends, text.token_count
    ends = np.union1d(document_ends, np.arange(sequence_length, total, sequence_length)).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
    within = np.searchsorted(document_ends, starts, "right")
    begins = text.begins[within] + starts - text.starts[within]
    return text.pieces(begins, begins + ends - starts, np.ones(len(ends), bool))
