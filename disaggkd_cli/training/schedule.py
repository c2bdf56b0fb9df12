"""What is computed when: the learning rate of each step, and the stream of micro-batches of each rank.

Both are pure functions of the config and the step, so a resumed run goes on exactly, and the stream can be read ahead
by whoever prefetches hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from disaggkd_cli.config import Config, TrainConfig
from disaggkd_cli.data import (
    PAD_MULTIPLE,
    GlobalBatch,
    MicroBatch,
    Sequence,
    TokenizedDataset,
    TrainingTexts,
    collate,
    empty_micro_batch,
)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of the optimizer step with index `step` (from 0).

    It rises linearly over `warmup_steps`, then falls to zero by a half cosine or a line, or stays.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    if train.schedule == "cosine":
        return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if train.schedule == "linear":
        return train.learning_rate * (1 - progress)
    return train.learning_rate


@dataclass(frozen=True)
class WorkItem:
    """One forward pass of one rank.

    Attributes:
        request_id: rises by one along a rank's stream; the same in every run of the same config.
        evaluation: whether this is evaluation (no gradients) rather than training.
        step: the optimizer step it belongs to; evaluation after step s carries s.
        batch: the micro-batch.
        supervised_rows: supervised rows of the whole optimizer step over all ranks, the loss's normaliser.
        tokens: tokens of this micro-batch, padding not counted.
    """

    request_id: int
    evaluation: bool
    step: int
    batch: MicroBatch
    supervised_rows: int
    tokens: int


@dataclass(frozen=True)
class WorkPlan:
    """The stream of one student rank.

    Attributes:
        config: the run's config.
        train, evaluation: the texts.
        rank: this student rank.
        pad_id: the token id that fills short rows up.
    """

    config: Config
    train: TrainingTexts
    evaluation: TokenizedDataset
    rank: int
    pad_id: int

    def evaluates_after(self, step: int) -> bool:
        """Return whether evaluation follows once `step` optimizer steps are done (0: before training)."""
        train = self.config.train
        return step in (0, train.steps) or (train.eval_every > 0 and step % train.eval_every == 0)

    @property
    def eval_sequences(self) -> int:
        """How many held-out sequences each evaluation reads."""
        limit = self.config.data.eval_sequences
        return len(self.evaluation) if limit is None else min(limit, len(self.evaluation))

    @property
    def eval_items(self) -> int:
        """Forward passes of one evaluation on each rank, the same on every rank."""
        per_pass = self.config.train.micro_batch_sequences * self.config.student.ranks
        return -(-self.eval_sequences // per_pass)

    @property
    def eval_rows(self) -> int:
        """Supervised rows of one evaluation over all ranks."""
        return int(self.evaluation.supervised_counts[: self.eval_sequences].sum())

    def items(self, first_step: int) -> Iterator[WorkItem]:
        """Yield the work from optimizer step `first_step` to the end, in order."""
        train = self.config.train
        request_id = self._request_id(first_step)
        if first_step == 0:
            yield from self._evaluation(0, request_id)
            request_id += self.eval_items
        batches = self.train.batches(self.config.seed, self.config.global_batch_sequences, first_step)
        for step, batch in zip(range(first_step, train.steps), batches, strict=False):
            yield from self._training(step, request_id, batch)
            request_id += train.accumulation
            if self.evaluates_after(step + 1):
                yield from self._evaluation(step + 1, request_id)
                request_id += self.eval_items

    def _request_id(self, first_step: int) -> int:
        if first_step == 0:
            return 0
        evaluations = sum(self.evaluates_after(step) for step in range(first_step + 1))
        return first_step * self.config.train.accumulation + evaluations * self.eval_items

    def _training(self, step: int, request_id: int, global_batch: GlobalBatch) -> Iterator[WorkItem]:
        config = self.config
        rows = global_batch.supervised_rows
        per_micro = config.train.micro_batch_sequences
        for micro in range(config.train.accumulation):
            start = (micro * config.student.ranks + self.rank) * per_micro
            sequences = global_batch.sequences(start, start + per_micro)
            batch = self._collate(sequences)
            yield WorkItem(request_id + micro, False, step, batch, rows, sum(map(len, sequences)))

    def _collate(self, sequences: list[Sequence]) -> MicroBatch:
        if not self.train.length_bucketing:
            return collate(sequences, self.pad_id)
        return collate(sequences, self.pad_id, PAD_MULTIPLE, self.config.data.sequence_length)

    @cached_property
    def _eval_order(self) -> np.ndarray:
        """Which held-out sequences, in which order: by length where batches are made by length."""
        chosen = np.arange(self.eval_sequences)
        if not self.train.length_bucketing:
            return chosen
        return np.argsort(self.evaluation.lengths[: self.eval_sequences], kind="stable")

    def _evaluation(self, step: int, request_id: int) -> Iterator[WorkItem]:
        config = self.config
        per_micro = config.train.micro_batch_sequences
        for number in range(self.eval_items):
            start = (number * config.student.ranks + self.rank) * per_micro
            sequences = [self.evaluation.sequence(int(index)) for index in self._eval_order[start : start + per_micro]]
            # A rank with nothing left still takes part: FSDP gathers weights from all ranks at each forward.
            batch = self._collate(sequences) if sequences else empty_micro_batch(1, 8, self.pad_id)
            yield WorkItem(request_id + number, True, step, batch, self.eval_rows, sum(map(len, sequences)))
