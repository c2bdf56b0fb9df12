"""The global batches of the training stream, one after the other, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.data.layout.micro_batch import Sequence
from disaggkd_cli.data.order.positions import StreamOrder
from disaggkd_cli.data.order.streaming import StreamedBatch, StreamedDataset


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one optimizer step over all ranks."""

    dataset: TokenizedDataset
    indices: np.ndarray
    """[G] which sequences of the dataset, in order."""

    @property
    def supervised_rows(self) -> int:
        """Rows that count in the whole step."""
        return int(self.dataset.supervised_counts[self.indices].sum())

    def sequences(self, start: int, stop: int) -> list[Sequence]:
        """Sequences start … stop - 1 of the batch."""
        return [self.dataset.sequence(int(index)) for index in self.indices[start:stop]]


def global_batches(
    dataset: TokenizedDataset, seed: int, size: int, first_step: int
) -> Iterator[GlobalBatch | StreamedBatch]:
    """Yield the batches of `size` sequences of steps first_step, first_step + 1, …, without end."""
    if isinstance(dataset, StreamedDataset):
        yield from dataset.batches(size, first_step)
    order = StreamOrder(dataset, seed, size)
    step = first_step
    while True:
        yield GlobalBatch(dataset, order.indices(step * size, size))
        step += 1
