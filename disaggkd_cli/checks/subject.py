"""What is checked: both models, the texts, and a few short rows of them, loaded as a run would load them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.checks.sample import dataset_of, sample_sequences
from disaggkd_cli.config import Config
from disaggkd_cli.config.by_device import student_dtype
from disaggkd_cli.config.layers import best_count, expected_layers
from disaggkd_cli.config.on_policy import student_writes_all
from disaggkd_cli.data import MicroBatch, Sequence, Splits, load_splits, load_tokenizer, padding_id
from disaggkd_cli.losses import Head, reference_kd_loss
from disaggkd_cli.models import (
    backbone_of,
    build_student,
    decide_packing,
    head_of,
    hidden_states,
    load_causal_lm,
    load_config,
    load_head,
    teacher_source,
)
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.training.schedule import WorkItem, WorkPlan
from disaggkd_cli.training.student_module import freeze
from disaggkd_cli.wire import format_of

_EQUAL = 1e-4
"""Forward KL in nats below which the student counts as equal to the teacher."""


@dataclass
class Subject:
    """Everything that the checks look at. Models are in eval mode, on `device`.

    Attributes:
        teacher: the whole teacher, in `teacher.dtype`.
        teacher_head: the head that the student would hold (read from the files alone when disaggregated).
        student: float32 master weights.
        sequences: four short sequences of the training data; of the held-out texts where the student writes everything,
            since those have answers.
        pack: whether the run packs documents into rows, and `pack_reason` why (not).
    """

    config: Config
    device: torch.device
    teacher: nn.Module
    teacher_head: Head
    student: nn.Module
    teacher_tokenizer: Any
    tokenizer: Any
    splits: Splits
    sequences: list[Sequence]
    pack: bool
    pack_reason: str
    _states: dict[bytes, Tensor] = field(default_factory=dict)

    @property
    def pad_id(self) -> int:
        """The id that fills short rows up, as in a run."""
        return padding_id(self.tokenizer)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the student computes in."""
        return DTYPES[student_dtype(self.config, self.device.type)]

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which hidden states reach the loss."""
        if self.config.mode == "colocated":
            return DTYPES[self.config.teacher.dtype]
        return format_of(self.config.transport.dtype).compute_dtype()

    @cached_property
    def batch(self) -> MicroBatch:
        """The sampled sequences as one micro-batch, made where training makes its own."""
        return self.work_items(ranks=1, micro_batch_sequences=len(self.sequences), accumulation=1)[0].batch.to(
            self.device
        )

    def work_items(self, ranks: int, micro_batch_sequences: int, accumulation: int) -> list[WorkItem]:
        """Return the first optimizer step over the sampled sequences, of all ranks one after the other."""
        config = dataclasses.replace(
            self.config,
            student=dataclasses.replace(self.config.student, ranks=ranks),
            train=dataclasses.replace(
                self.config.train, micro_batch_sequences=micro_batch_sequences, accumulation=accumulation, steps=1
            ),
        )
        dataset = dataset_of(self.sequences)
        plans = [WorkPlan(config, dataset, dataset, rank, self.pad_id) for rank in range(ranks)]
        return [item for plan in plans for item in plan.items(0) if not item.evaluation and item.step == 0]

    @torch.no_grad()
    def teacher_states(self, batch: MicroBatch) -> Tensor:
        """Return the teacher's hidden states [R, H_t] of a micro-batch's supervised rows, as the loss receives them.

        Each sequence goes through the teacher alone and without its padding, so that one token has the same states in
        whatever micro-batch it stands.
        """
        found = []
        for row in range(len(batch.input_ids)):
            supervised = torch.nonzero(batch.labels[row] != -100).reshape(-1)
            if not supervised.numel():
                continue
            end = int(supervised[-1]) + 1
            ids, positions = batch.input_ids[row : row + 1, :end], batch.position_ids[row : row + 1, :end]
            key = ids.cpu().numpy().tobytes() + positions.cpu().numpy().tobytes()
            if key not in self._states:
                self._states[key] = hidden_states(backbone_of(self.teacher), ids, positions)[0]
            found.append(self._states[key][supervised])
        # Rounded as the wire rounds them, then computed with in the head's dtype, as by a student.
        return torch.cat(found).to(self.wire_dtype).to(self.teacher_head.weight.dtype)

    def contrary_states(self, batch: MicroBatch) -> Tensor:
        """Return `teacher_states`, reversed when the student starts equal to the teacher.

        A loss and a gradient of nothing but rounding could not be compared with anything.
        """
        states = self.teacher_states(batch)
        return -states if self.starts_equal else states

    @cached_property
    @torch.no_grad()
    def starts_equal(self) -> bool:
        """Whether the student already gives the teacher's distributions, but for rounding."""
        batch, rows = self.batch, slice(0, 16)
        states = hidden_states(backbone_of(self.student), batch.input_ids, batch.position_ids)
        student_hidden = states.reshape(-1, states.shape[-1])[batch.rows]
        teacher_hidden = self.teacher_states(batch)
        out = reference_kd_loss(student_hidden[rows], head_of(self.student), teacher_hidden[rows], self.teacher_head)
        return out.kd.item() < _EQUAL


def load_subject(config: Config, device: torch.device, log: Callable[[str], None]) -> Subject:
    """Load everything that is to be checked.

    Raises:
        UserError: a model, a tokenizer or the texts cannot be read at all.
    """
    source = teacher_source(config)
    dtype = DTYPES[config.teacher.dtype]
    config = _with_any_layers(config, source)
    log("reading the texts")
    teacher_tokenizer = load_tokenizer(config.teacher.model)
    tokenizer = load_tokenizer(config.student.model) if config.student.model else teacher_tokenizer
    pack, reason = decide_packing(config)
    alone = student_writes_all(config)
    splits = load_splits(config.data, tokenizer, pack=pack, seed=config.seed, prompts=alone)
    log("loading the teacher")
    teacher = load_causal_lm(source, dtype, "teacher.model").to(device)
    head = load_head(source, dtype, "teacher.model") if config.mode == "disaggregated" else head_of(teacher).detached()
    bias = None if head.bias is None else head.bias.to(device)
    log("loading the student")
    student = build_student(config).to(device)
    freeze(student, config.student.freeze)
    return Subject(
        config=config,
        device=device,
        teacher=teacher.requires_grad_(False),
        teacher_head=Head(head.weight.to(device), bias, head.scale, head.softcap),
        student=student,
        teacher_tokenizer=teacher_tokenizer,
        tokenizer=tokenizer,
        splits=splits,
        sequences=sample_sequences(splits.evaluation if alone else splits.train.sample, config.seed),
        pack=pack,
        pack_reason=reason,
    )


def _with_any_layers(config: Config, source: Any) -> Config:
    """Return the config with evenly spread layers in the place of `best_N`: what is proved holds of any choice."""
    section = config.student.from_teacher
    if section is None or best_count(section.layers) is None:
        return config
    count = load_config(source, "teacher.model").get_text_config().num_hidden_layers
    layers = expected_layers(section.layers, count)
    student = dataclasses.replace(config.student, from_teacher=dataclasses.replace(section, layers=layers))
    return dataclasses.replace(config, student=student)
