"""Which sequence comes at which position of the endless training stream: a pure function of (seed, position).

The stream is one shuffled pass over all sequences after the other; an epoch's end is no boundary, so nothing is
dropped there. Nothing else has a say: not the number of ranks, nor the micro-batch, nor accumulation. To resume is to
go on from a position.

Each pass's order is the stable argsort of raw 64-bit outputs of the Philox counter generator (Salmon et al., SC 2011),
keyed by the first 128 bits of sha256 over seed, purpose and epoch. Raw outputs are used because NumPy keeps those of a
bit generator stable across its releases, and `Generator.permutation` not.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np


def permutation(count: int, seed: int, epoch: int, purpose: str = "order") -> np.ndarray:
    """[count] int64: a shuffle of range(count), fixed by (seed, epoch, purpose)."""
    digest = hashlib.sha256(f"disaggkd {purpose} seed={seed} epoch={epoch}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))
    return np.argsort(generator.random_raw(count), kind="stable")


@lru_cache(maxsize=8)
def _epoch_order(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    order = permutation(count, seed, epoch, purpose)
    order.flags.writeable = False
    return order


def sequence_indices(count: int, seed: int, start: int, number: int, purpose: str = "order") -> np.ndarray:
    """[number] int64: which of `count` sequences stand at positions start, start + 1, … of the stream (from 0, no end).

    Raises:
        ValueError: no sequences, or a position before the start.
    """
    if count < 1 or start < 0 or number < 0:
        raise ValueError(f"no positions {start} … {start + number} in a stream over {count} sequences")
    parts = []
    while number:
        epoch, within = divmod(start, count)
        part = _epoch_order(count, seed, epoch, purpose)[within : within + number]
        parts.append(part)
        start, number = start + len(part), number - len(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
