"""Prove a model family: its head, its packing, both roles, the loss over it, and its way back to a model directory."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import MicroBatch, Sequence, collate, load_tokenizer
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.models import (
    backbone_of,
    head_of,
    load_causal_lm,
    load_head,
    packs_documents,
    requested_states,
    resolve_source,
    student_from_layers,
    verify_packing,
    verify_split,
)
from disaggkd_cli.training.export import export_student
from disaggkd_cli.training.layout import student_mesh
from disaggkd_cli.training.student_module import StudentModule, shard_student
from tests.support.models import VOCABULARY, tiny_model
from tests.support.runs import TINY_TEACHER

TOLERANCE = 1e-4
"""Relative; float32 throughout."""


@dataclass(frozen=True)
class FamilyRow:
    """What was proved of a family.

    Attributes:
        model_class: the transformers class.
        head: what its head does besides the matrix product, as verified on its own logits.
        packs, packing: whether several documents share a row, and why (not).
        leaks: whether documents in one row do see each other, as measured.
        teacher: the head read from the files alone is the model's, and requested rows are the model's states.
        cut: layers of the student cut out of it, or why it cannot be cut.
        fused_error: fused against full logits through the trainer's module: loss and all gradients.
        sharded_error: the same through FSDP over one rank, against the module before it was sharded.
        exported: the trained student reloads with equal logits.
    """

    family: str
    model_class: str
    head: str
    packs: bool
    packing: str
    leaks: bool
    teacher: bool
    cut: str
    fused_error: float
    sharded_error: float
    exported: bool


@lru_cache
def family_row(family: str) -> FamilyRow:
    """Prove one family on a tiny random model of its real class and return what was found."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name, group_of_one():
        directory = Path(name)
        teacher = tiny_model(family)
        teacher.save_pretrained(directory / "teacher")
        teacher = load_causal_lm(resolve_source(str(directory / "teacher")), torch.float32, "teacher.model")
        verify_split(teacher, head_of(teacher), family)
        packs, reason = packs_documents(teacher.config)
        student, cut = _cut(teacher)
        batch = micro_batch(packs)
        fused_error, sharded_error = _loss_errors(student, teacher, batch)
        return FamilyRow(
            family=family,
            model_class=type(teacher).__name__,
            head=describe_head(head_of(teacher)),
            packs=packs,
            packing=reason,
            leaks=_leaks(teacher),
            teacher=_teaches(teacher, directory / "teacher", batch),
            cut=cut,
            fused_error=fused_error,
            sharded_error=sharded_error,
            exported=_exports(student, directory / "student"),
        )


@contextmanager
def group_of_one() -> Iterator[None]:
    """A default process group with this process alone in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def micro_batch(packed: bool) -> MicroBatch:
    """Two rows of random ids, padded; the first of two documents when `packed`."""
    generator = np.random.default_rng(0)

    def row(*lengths: int) -> Sequence:
        ids = generator.integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        labels[np.cumsum(lengths) - 1] = -100
        return Sequence(ids, labels, lengths)

    return collate([row(9, 6) if packed else row(15), row(11)], pad_id=0)


def describe_head(head: Head) -> str:
    """A head in a few words, empty for a plain matrix product."""
    parts = [f"scale {head.scale:g}"] if head.scale != 1.0 else []
    parts += [f"soft cap {head.softcap:g}"] if head.softcap is not None else []
    return ", ".join([*parts, *(["bias"] if head.bias is not None else [])])


def _leaks(model: nn.Module) -> bool:
    try:
        verify_packing(backbone_of(model), VOCABULARY, "the model")
    except UserError:
        return True
    return False


@torch.no_grad()
def _teaches(model: nn.Module, directory: Path, batch: MicroBatch) -> bool:
    alone, whole = load_head(resolve_source(str(directory)), torch.float32, "teacher.model"), head_of(model)
    same_head = torch.equal(alone.weight, whole.weight) and (alone.scale, alone.softcap) == (whole.scale, whole.softcap)
    rows = requested_states(
        backbone_of(model), batch.input_ids, batch.flat_document_lengths, batch.rows, torch.device("cpu")
    )
    own = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    logits = nn.functional.linear(rows, whole.weight, whole.bias) * whole.scale
    if whole.softcap is not None:
        logits = whole.softcap * torch.tanh(logits / whole.softcap)
    own = own.reshape(-1, own.shape[-1])[batch.rows]
    return same_head and bool((logits - own).abs().max() <= 1e-5 * own.abs().max())


def _cut(teacher: nn.Module) -> tuple[nn.Module, str]:
    """Every other layer, so that both kinds of a hybrid's layers must be told apart; or the whole teacher."""
    try:
        student = student_from_layers(teacher, [0, 3], torch.float32)
    except UserError as error:
        return copy.deepcopy(teacher), str(error)
    verify_split(student.eval(), head_of(student), "the student")
    return student, "layers 0 and 3"


def _loss_errors(student: nn.Module, teacher: nn.Module, batch: MicroBatch) -> tuple[float, float]:
    rows = requested_states(
        backbone_of(teacher), batch.input_ids, batch.flat_document_lengths, batch.rows, torch.device("cpu")
    ).clone()

    def module_of(model: nn.Module, implementation: str) -> StudentModule:
        loss = LossConfig(divergence="jsd", temperature=2.0, ce_weight=0.5, implementation=implementation)
        return StudentModule(model, head_of(teacher).detached(), loss)

    def run(module: StudentModule) -> tuple[float, dict[str, torch.Tensor]]:
        module.zero_grad(set_to_none=True)
        # The rows of the teacher are of other tokens, so that teacher and student never agree by construction.
        loss, _ = module(batch, rows.roll(1, 0), batch.supervised_count)
        loss.backward()
        gradients = {
            name: getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)().clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        return loss.item(), gradients

    full = run(module_of(student, "full"))
    fused = run(module_of(student, "fused"))
    sharded = module_of(copy.deepcopy(student), "fused")
    shard_student(sharded, student_mesh("cpu", dist.group.WORLD), torch.float32, "none")
    return _off(fused, full), _off(run(sharded), fused)


def _off(result: tuple[float, dict], reference: tuple[float, dict]) -> float:
    """The larger relative error, of the loss and of the gradient of all parameters together."""
    assert result[1].keys() == reference[1].keys()
    difference = sum((result[1][name] - gradient).double().square().sum() for name, gradient in reference[1].items())
    size = sum(gradient.double().square().sum() for gradient in reference[1].values())
    return max(abs(result[0] - reference[0]) / abs(reference[0]), float((difference / size) ** 0.5))


@lru_cache
def _tokenizer():
    return load_tokenizer(TINY_TEACHER)


@torch.no_grad()
def _exports(student: nn.Module, directory: Path) -> bool:
    batch = micro_batch(False)
    own = student(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    export_student(student, _tokenizer(), directory, torch.float32)
    again = load_causal_lm(resolve_source(str(directory)), torch.float32, "the exported student")
    reloaded = again(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return torch.equal(own, reloaded)
