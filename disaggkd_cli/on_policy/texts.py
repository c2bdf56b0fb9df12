"""The training texts of an on-policy run: the data's own sequences, and in their places what the student wrote.

The stream is read ahead by a thread of its own while the trainer writes windows, so a step's batch is handed out once
its window is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.data import Sequence, StreamOrder, TokenizedDataset
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.prompts import prompt_of
from disaggkd_cli.on_policy.proportion import Proportion, WrittenPlace
from disaggkd_cli.on_policy.windows import Windows


@dataclass(frozen=True)
class OnPolicyBatch:
    """A global batch: sequences of a dataset, some of them replaced."""

    dataset: TokenizedDataset
    indices: np.ndarray
    """[G] which sequences of the dataset."""
    completions: dict[int, Completion]
    """By place in the batch: what the student wrote."""

    @property
    def supervised_rows(self) -> int:
        """Supervised rows of the whole step, given and written ones together."""
        given = [index for place, index in enumerate(self.indices) if place not in self.completions]
        written = sum(one.supervised_rows for one in self.completions.values())
        return int(self.dataset.supervised_counts[given].sum()) + written

    def sequences(self, start: int, stop: int) -> list[Sequence]:
        """Sequences start … stop - 1 of the batch."""
        return [
            self.completions[place].sequence()
            if place in self.completions
            else self.dataset.sequence(int(self.indices[place]))
            for place in range(start, min(stop, len(self.indices)))
        ]


class OnPolicyTexts:
    """`TrainingTexts` in which the student writes a share.

    Args:
        dataset: sequences of one document each, every prompt with room for a completion.
        section: of the config.
        seed: the run's.
        size: sequences of a global batch.
        steps: of the run.
    """

    def __init__(self, dataset: TokenizedDataset, section: OnPolicyConfig, seed: int, size: int, steps: int) -> None:
        self.dataset = dataset
        self.section = section
        self.size = size
        self.windows = Windows(section.every, section.lag, steps)
        self.proportion = Proportion.of(section.fraction, section.samples)
        self._prompt_order = StreamOrder(dataset, seed, size)  # of the trainer's thread
        self._changed = threading.Condition()
        self._held: dict[int, Completion] = {}
        self._ready: set[int] = set()
        self._closed = False

    fingerprint = property(lambda self: self.dataset.fingerprint)
    notes = property(lambda self: self.dataset.notes)
    length_bucketing = property(lambda self: self.dataset.length_bucketing)
    sample = property(lambda self: self.dataset)
    whole = property(lambda self: self.dataset)

    def verify(self, check: Callable[[np.ndarray, np.ndarray], Any]) -> None:
        """Call `check` with all token ids and labels of the data."""
        self.dataset.verify(check)

    def places(self, window: int) -> list[WrittenPlace]:
        """What is written in a window, in order."""
        steps = self.windows.steps_of(window)
        return self.proportion.written(steps.start * self.size, steps.stop * self.size)

    def prompt(self, place: WrittenPlace) -> list[int]:
        """The prompt's token ids. Called from the trainer's thread."""
        (index,) = self._prompt_order.indices(place.prompt, 1)
        return prompt_of(self.dataset.sequence(int(index)), self.section.prompt_tokens).tolist()

    def due(self, done: int) -> list[int]:
        """The windows to be written now that `done` steps are done."""
        return [window for window in self.windows.due(done) if window not in self._ready]

    def add(self, window: int, completions: list[Completion]) -> None:
        """Hand a window over to whoever waits for it.

        Raises:
            ValueError: they are not what is written in that window.
        """
        if [one.position for one in completions] != [place.position for place in self.places(window)]:
            raise ValueError(f"window {window} has other completions than it should have")
        with self._changed:
            self._held.update({one.position: one for one in completions})
            self._ready.add(window)
            self._changed.notify_all()

    def forget(self, done: int) -> None:
        """Drop what was written for steps before `done`."""
        with self._changed:
            self._held = {place: one for place, one in self._held.items() if place >= done * self.size}

    def kept(self, done: int) -> list[Completion]:
        """What is written and not yet trained on after `done` steps: what a checkpoint carries."""
        with self._changed:
            return [self._held[place] for place in sorted(self._held) if place >= done * self.size]

    def restore(self, done: int, completions: list[Completion], where: str) -> None:
        """Take up what a checkpoint after `done` steps carries.

        Raises:
            UserError: naming `where`, when it lacks something.
        """
        held = {one.position: one for one in completions}
        windows = set(self.windows.open(done))
        windows |= {self.windows.of_step(position // self.size) for position in held}
        for window in sorted(windows):
            wanted = [place.position for place in self.places(window) if place.position >= done * self.size]
            if missing := [position for position in wanted if position not in held]:
                raise UserError(f"{where}: lacks {len(missing)} of the texts that the student wrote in window {window}")
        with self._changed:
            self._held, self._ready = held, windows
            self._changed.notify_all()

    def of_step(self, step: int) -> list[Completion]:
        """What was written for one optimizer step."""
        with self._changed:
            return [
                self._held[place] for place in range(step * self.size, (step + 1) * self.size) if place in self._held
            ]

    def batches(self, seed: int, size: int, first_step: int) -> Iterator[OnPolicyBatch]:
        """Yield the batches of steps first_step, first_step + 1, …, each once it is written, until `close`."""
        order = StreamOrder(self.dataset, seed, size)
        step = first_step
        while self._wait(step):
            completions = {one.position - step * size: one for one in self.of_step(step)}
            yield OnPolicyBatch(self.dataset, order.indices(step * size, size), completions)
            step += 1

    def _wait(self, step: int) -> bool:
        window = self.windows.of_step(step)
        with self._changed:
            # Ended by `close`, which the trainer calls whenever it writes no more.
            self._changed.wait_for(lambda: self._closed or window in self._ready)
            return not self._closed

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def remember_in(self, directory: Any, *, write: bool) -> None:
        """Nothing: any step's sequences are known at once."""
