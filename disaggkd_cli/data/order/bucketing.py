"""Batches of similar lengths: the stream is re-ordered within windows, so that less is padded.

A window is WINDOW_BATCHES global batches of the shuffled stream; where one source is trained on alone it ends with the
epoch too, so that each epoch still holds every sequence just once. Within a window sequences are sorted by length and
dealt to its batches, and the batches are shuffled. Every global batch thus holds neighbours in length, whichever rank
and micro-batch they fall to, and the order is a function of (seed, position, global batch) alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from disaggkd_cli.data.order.shuffle import permutation

WINDOW_BATCHES = 64
PAD_MULTIPLE = 8
"""Rows of bucketed batches are padded up to a multiple of it: few shapes, and aligned ones."""


def window_of(position: int, batch: int, epoch: int | None) -> tuple[int, int]:
    """(first position, position after the last) of the window that `position` is in.

    Args:
        position: a position of the stream.
        batch: sequences of a global batch.
        epoch: sequences of an epoch, at whose end a window ends too; None: windows know no epochs.
    """
    size = batch * WINDOW_BATCHES
    first = position // size * size
    after = first + size
    if epoch is not None:
        first = max(first, position // epoch * epoch)
        after = min(after, (position // epoch + 1) * epoch)
    return first, after


def order_by_length(lengths: np.ndarray, first: int, batch: int, seed: int) -> np.ndarray:
    """[n] int64: which of a window's n sequences stands at each of its positions.

    Args:
        lengths: [n] tokens of the sequences, in the stream's order.
        first: the window's first position; batches begin at multiples of `batch`.
        batch: sequences of a global batch.
        seed: decides the order of the batches.
    """
    count = len(lengths)
    inner = np.arange(-first % batch, count, batch)
    starts = np.union1d([0], inner).astype(np.int64)
    sizes = np.diff(np.append(starts, count))
    dealt = permutation(len(starts), seed, first, purpose="batches by length")
    by_length = np.argsort(lengths, kind="stable")
    order = np.empty(count, np.int64)
    ends = np.cumsum(sizes[dealt])
    for slot, end in zip(dealt.tolist(), ends.tolist(), strict=True):
        order[starts[slot] : starts[slot] + sizes[slot]] = by_length[end - sizes[slot] : end]
    return order


def padded_tokens(lengths: np.ndarray, rows: int, multiple: int, limit: int) -> int:
    """Tokens, padding included, of consecutive micro-batches of `rows` sequences each.

    Args:
        lengths: [n] tokens of the sequences.
        rows: sequences of a micro-batch.
        multiple, limit: a micro-batch is as long as its longest, rounded up to `multiple` but not above `limit`.
    """
    starts = np.arange(0, len(lengths), rows)
    if not len(starts):
        return 0
    longest = np.maximum.reduceat(lengths, starts)
    longest = np.maximum(longest, np.minimum(-(-longest // multiple) * multiple, limit))
    return int((longest * np.diff(np.append(starts, len(lengths)))).sum())


def positions_by_window(start: int, number: int, batch: int, epoch: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Yield (window's first position, position after its last, from, to): the parts of `number` positions by window."""
    end = start + number
    while start < end:
        first, after = window_of(start, batch, epoch)
        yield first, after, start, min(after, end)
        start = after
