"""Which sequence of a dataset stands at which position of the training stream, sources mixed and lengths bucketed."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from disaggkd_cli.data.order.bucketing import order_by_length, positions_by_window
from disaggkd_cli.data.order.mixing import Mixture
from disaggkd_cli.data.order.shuffle import sequence_indices


class Sequences(Protocol):
    """What an order must know of a dataset: how many sequences, how long, and of which sources."""

    lengths: np.ndarray
    weights: tuple[int, ...]
    source_sizes: tuple[int, ...]
    length_bucketing: bool

    def __len__(self) -> int: ...


class StreamOrder:
    """The endless order of one dataset: a pure function of the dataset, the seed and the global batch."""

    def __init__(self, dataset: Sequences, seed: int, batch: int, bucketed: bool | None = None):
        """`batch`: sequences of a global batch. `bucketed`: as the dataset says, unless given."""
        self._dataset = dataset
        self._seed = seed
        self._batch = batch
        self._bucketed = dataset.length_bucketing if bucketed is None else bucketed
        self._sizes = dataset.source_sizes or (len(dataset),)
        self._window: tuple[int, np.ndarray] | None = None

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self._dataset.lengths

    @cached_property
    def _mixture(self) -> Mixture:
        return Mixture.of(self._dataset.weights)

    def indices(self, start: int, number: int) -> np.ndarray:
        """[number] int64: the sequences at positions start, start + 1, … (from 0, no end)."""
        if not self._bucketed:
            return self._shuffled(start, number)
        epoch = len(self._dataset) if len(self._sizes) == 1 else None
        parts = [np.empty(0, np.int64)]
        for first, after, begin, end in positions_by_window(start, number, self._batch, epoch):
            if self._window is None or self._window[0] != first:
                window = self._shuffled(first, after - first)
                self._window = first, window[order_by_length(self._lengths[window], first, self._batch, self._seed)]
            parts.append(self._window[1][begin - first : end - first])
        return np.concatenate(parts)

    def _shuffled(self, start: int, number: int) -> np.ndarray:
        if len(self._sizes) == 1:
            return sequence_indices(self._sizes[0], self._seed, start, number)
        source, within = self._mixture.sources(start, number)
        found = np.empty(number, np.int64)
        begins = np.cumsum(self._sizes) - self._sizes
        for index, size in enumerate(self._sizes):
            here = np.flatnonzero(source == index)
            if len(here):
                # Within one call a source's positions are consecutive.
                first = int(within[here[0]])
                purpose = "order" if index == 0 else f"order of source {index}"
                found[here] = begins[index] + sequence_indices(size, self._seed, first, len(here), purpose)
        return found
