"""What a run trains on, whether all of it is laid out before or it is read while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from disaggkd_cli.data.layout.micro_batch import Sequence


class LaidOut(Protocol):
    """A dataset whose sequences are at hand, to be taken by index; `TokenizedDataset` is one."""

    supervised_counts: np.ndarray

    def sequence(self, index: int) -> Sequence: ...


class GlobalBatch(Protocol):
    """The sequences of one optimizer step over all ranks."""

    @property
    def supervised_rows(self) -> int:
        """Supervised rows of the whole step."""

    def sequences(self, start: int, stop: int) -> list[Sequence]:
        """Sequences start … stop - 1 of the batch."""


class TrainingTexts(Protocol):
    """An endless, fixed order of global batches. `TokenizedDataset` and `StreamedTexts` are such."""

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over all that decides the batches."""

    @property
    def notes(self) -> list[str]:
        """What the user should know."""

    @property
    def length_bucketing(self) -> bool:
        """Whether batches are made of sequences of similar lengths."""

    @property
    def sample(self) -> LaidOut:
        """Sequences that are at hand before training, to check models and texts by: all, or the beginning."""

    @property
    def whole(self) -> LaidOut | None:
        """All sequences; None where they are read while training goes on."""

    def batches(self, seed: int, size: int, first_step: int) -> Iterator[GlobalBatch]:
        """Yield the batches of `size` sequences of steps first_step, first_step + 1, …, without end."""

    def verify(self, check: Callable[[np.ndarray, np.ndarray], Any]) -> None:
        """Call `check` with all token ids and labels, before they are trained on; it raises where they may not be."""

    def remember_in(self, directory: Path, *, write: bool) -> None:
        """Keep in a directory what makes resuming quick, and learn from what an earlier start has kept there."""


@dataclass(frozen=True)
class IndexedBatch:
    """A global batch out of a laid-out dataset."""

    dataset: LaidOut
    indices: np.ndarray
    """[G] which sequences of the dataset, in order."""

    @property
    def supervised_rows(self) -> int:
        """Supervised rows of the whole step."""
        return int(self.dataset.supervised_counts[self.indices].sum())

    def sequences(self, start: int, stop: int) -> list[Sequence]:
        """Sequences start … stop - 1 of the batch."""
        return [self.dataset.sequence(int(index)) for index in self.indices[start:stop]]
