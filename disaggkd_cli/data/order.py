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

import numpy as np


def permutation(count: int, seed: int, epoch: int, purpose: str = "order") -> np.ndarray:
    """[count] int64: a shuffle of range(count), fixed by (seed, epoch, purpose)."""
    digest = hashlib.sha256(f"disaggkd {purpose} seed={seed} epoch={epoch}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))
    return np.argsort(generator.random_raw(count), kind="stable")


class SequenceOrder:
    """Position of the stream → index of a sequence. Holds the current epoch's shuffle only to save time."""

    def __init__(self, count: int, seed: int):
        if count < 1:
            raise ValueError("an order needs at least one sequence")
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._shuffle = np.empty(0, dtype=np.int64)

    def index(self, position: int) -> int:
        """The sequence at `position` (from 0, without end)."""
        if position < 0:
            raise ValueError(f"position {position} is before the start")
        epoch, within = divmod(position, self.count)
        if epoch != self._epoch:
            self._shuffle, self._epoch = permutation(self.count, self.seed, epoch), epoch
        return int(self._shuffle[within])

    def indices(self, start: int, count: int) -> list[int]:
        """The sequences at positions start, start + 1, …, start + count - 1."""
        return [self.index(position) for position in range(start, start + count)]

    def epoch(self, position: int) -> float:
        """Passes over the data that lie before `position`."""
        return position / self.count
