"""The student's own ranks write: whenever a window is due, each rank some of its batches, and all tell each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from disaggkd_cli.collective_texts import gathered_texts
from disaggkd_cli.on_policy.completions import Completion, as_text, from_text
from disaggkd_cli.on_policy.gathered import GatheredStudent
from disaggkd_cli.on_policy.generate import generate
from disaggkd_cli.on_policy.proportion import WrittenPlace
from disaggkd_cli.on_policy.sampling import Sampler
from disaggkd_cli.on_policy.texts import OnPolicyTexts
from disaggkd_cli.on_policy.uniforms import uniforms

FILE = "completions.json"
"""Of a checkpoint: what was written and not yet trained on."""


@dataclass
class StudentWriter:
    """Writes windows with the weights of the moment.

    Attributes:
        texts: where they go.
        copy: takes the weights.
        sampler, ends, pad_id: see `generate`.
        seed: the run's.
        batch: prompts that are completed at once.
        device: where the student computes.
    """

    texts: OnPolicyTexts
    copy: GatheredStudent
    sampler: Sampler
    ends: frozenset[int]
    pad_id: int
    seed: int
    batch: int
    device: torch.device
    _seconds: dict[str, float] = field(default_factory=dict)

    def write_due(self, model: nn.Module, done: int) -> None:
        """Write the windows that are due after `done` steps, and forget what was trained on. Collective."""
        self.texts.forget(done)
        self._seconds = {"generation_seconds": 0.0, "weights_seconds": 0.0}
        due = self.texts.due(done)
        if not due:
            return
        begun = time.monotonic()
        with self.copy.with_weights(model) as whole:
            gathered = time.monotonic()
            for window in due:
                self.texts.add(window, self._write(whole, self.texts.places(window)))
        self._seconds = {"generation_seconds": time.monotonic() - gathered, "weights_seconds": gathered - begun}

    def _write(self, model: nn.Module, places: list[WrittenPlace]) -> list[Completion]:
        """Write batch b on rank b modulo the ranks: which prompts share a batch is a function of the step alone."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        batches = [places[at : at + self.batch] for at in range(0, len(places), self.batch)]
        own = [one for batch in batches[rank::ranks] for one in self._complete_places(model, batch)]
        every = [
            one for text in gathered_texts(as_text(own)) for one in from_text(text, "a student rank's completions")
        ]
        return sorted(every, key=lambda one: one.position)

    def _complete_places(self, model: nn.Module, places: list[WrittenPlace]) -> list[Completion]:
        return self.complete(model, "train", places, [self.texts.prompt(place) for place in places])

    def complete(
        self, model: nn.Module, purpose: str, places: list[WrittenPlace], prompts: list[list[int]]
    ) -> list[Completion]:
        """Return a completion of each prompt, all in one batch.

        Args:
            model: whole, with weights.
            purpose: see `uniforms`; with it the places name the numbers that are drawn with.
        """
        tokens = self.texts.section.max_new_tokens
        numbers = np.stack([uniforms(self.seed, purpose, place.prompt, place.sample, tokens) for place in places])
        written = generate(model, prompts, numbers, self.sampler, self.ends, self.pad_id, self.device)
        return [
            Completion(place.position, tuple(prompt), one.ids, one.stopped, one.entropy)
            for place, prompt, one in zip(places, prompts, written, strict=True)
        ]

    def checkpoint(self, done: int) -> dict[str, str]:
        """Return the file that a checkpoint after `done` steps carries, by its name."""
        return {FILE: as_text(self.texts.kept(done))}

    def figures(self, step: int, kd: float, written_kd: float, rows: int) -> dict[str, float]:
        """Return what the metrics of optimizer step `step` (from 0) say of its texts, the same on every rank.

        Args:
            kd, written_kd: the step's divergence and the part of it in written rows, both divided by `rows`.
            rows: supervised rows of the step.
        """
        texts = self.texts.of_step(step)
        written = sum(one.supervised_rows for one in texts)
        tokens = sum(len(one.ids) for one in texts)
        found = dict(self._seconds)
        if written:
            found["on_policy_kd"] = written_kd * rows / written
        if rows > written:
            found["data_kd"] = (kd - written_kd) * rows / (rows - written)
        if texts:
            found["completion_tokens_mean"] = tokens / len(texts)
            found["completion_cut_share"] = sum(not one.stopped for one in texts) / len(texts)
            found["completions_empty"] = sum(one.empty for one in texts)
            found["sampled_entropy"] = sum(one.entropy for one in texts) / tokens
        return found
