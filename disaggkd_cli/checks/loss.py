"""Is the loss zero where it must be, and is the fused loss the full one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from disaggkd_cli.checks.result import CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.config.by_device import loss_budget
from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss
from disaggkd_cli.losses.hidden_names import MSE
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.training.process import memory_for_this_process
from disaggkd_cli.training.student_module import StudentModule

_ORACLE_BYTES = 128 * 2**20
"""Size of one matrix of float64 logits; the oracle holds some ten of them."""
_MOST_ROWS = 256
_MOST_HEAD_BYTES = 2**30
EQUAL_START = " (teacher's states reversed, since the student starts equal to the teacher)"


def loss_arguments(subject: Subject) -> dict[str, Any]:
    """Return the loss section of the config as arguments of the losses."""
    loss = subject.config.loss
    return {
        "divergence": loss.divergence,
        "temperature": loss.temperature,
        "beta": loss.beta,
        "kd_weight": loss.kd_weight,
        "ce_weight": loss.ce_weight,
    }


def student_module(subject: Subject) -> StudentModule:
    """Return the trainer's module around the student of the subject."""
    return StudentModule(subject.student, subject.teacher_head, subject.config.loss, seed=subject.config.seed)


def plain_hidden_loss(
    subject: Subject, student_hidden: Tensor, teacher_hidden: Tensor, projection: Tensor | None, rows: int
) -> Tensor | float:
    """Return the weighted loss of hidden states as its definition has it, in float64; 0 where the config has none."""
    if projection is None:
        return 0.0
    states, wanted = student_hidden.double() @ projection.double().T, teacher_hidden.double()
    if subject.config.loss.hidden_loss == MSE:
        distances = ((states - wanted) ** 2).sum(1) / wanted.shape[1]
    else:
        distances = 1 - (states * wanted).sum(1) / (states.norm(dim=1) * wanted.norm(dim=1))
    return subject.config.loss.hidden_weight * distances.sum() / rows


def oracle_rows(subject: Subject) -> int:
    """Return how many rows fit the oracle's float64 logits."""
    widest = max(subject.teacher_head.weight.shape[0], head_of(subject.student).weight.shape[0])
    return max(4, min(_MOST_ROWS, _ORACLE_BYTES // (8 * widest)))


def check_zero(subject: Subject) -> CheckResult:
    """Put the teacher in the student's place: loss and gradient must vanish."""
    states = subject.teacher_states(subject.batch)[: oracle_rows(subject)]
    head = subject.teacher_head
    arguments = {**loss_arguments(subject), "kd_weight": 1.0, "ce_weight": 0.0}

    def loss_and_gradient(hidden: Tensor) -> tuple[float, float]:
        hidden = hidden.detach().clone().requires_grad_()
        out = fused_kd_loss(hidden, head, states, head, None, memory_budget=_budget(subject), **arguments)
        out.loss.backward()
        return out.loss.item(), hidden.grad.double().norm().item()

    loss, gradient = loss_and_gradient(states)
    other_loss, other_gradient = loss_and_gradient(-states)
    small = 1e-5 if states.dtype == torch.float32 else 1e-3
    return judge(
        abs(loss) <= 1e-6 + small * abs(other_loss) and gradient <= 1e-9 + small * other_gradient,
        f"loss {loss:.1e}, gradient {gradient:.1e}",
        f"{subject.config.loss.divergence} of the teacher from itself on {len(states)} real rows; from reversed states "
        f"it is {other_loss:.3g}, gradient {other_gradient:.1e}",
        "a divergence must vanish, with its gradient, where both distributions are equal",
        loss=loss,
        gradient=gradient,
    )


def check_fused(subject: Subject) -> CheckResult:
    """Compare the fused loss, its gradients and the trainer's own loss with full logits in float64."""
    batch, rows = subject.batch, oracle_rows(subject)
    with torch.no_grad():
        states = hidden_states(backbone_of(subject.student), batch.input_ids, batch.position_ids)
        student_hidden = states.reshape(-1, states.shape[-1])[batch.rows]
    teacher_hidden = subject.contrary_states(batch)
    arguments = loss_arguments(subject)
    truth = reference_kd_loss(
        student_hidden[:rows], head_of(subject.student).detached(), teacher_hidden[:rows], subject.teacher_head,
        batch.row_labels[:rows], compute_dtype=torch.float64, num_tokens=rows, **arguments,
    )  # fmt: skip
    module = student_module(subject)
    trainer = _trainer_loss(subject, module, rows)
    projection = None if module.projection is None else module.projection.detach()
    hidden = plain_hidden_loss(subject, student_hidden[:rows], teacher_hidden[:rows], projection, rows)
    wanted = truth.loss.item() + float(hidden)
    whole = abs(trainer - wanted) / max(abs(wanted), 1e-6)
    errors = _errors(subject, student_hidden[:rows], teacher_hidden[:rows], batch.row_labels[:rows], arguments)
    eps = torch.finfo(subject.compute_dtype).eps
    passed = whole <= 1e-4
    for part, (fused, full) in errors.items():
        passed &= fused <= 2 * full + (1e-5 if part == "loss" else max(1e-5, 2 * eps))
    worst = max(fused for fused, _ in errors.values())
    full_worst = max(full for _, full in errors.values())
    count = min(rows, len(student_hidden))
    return judge(
        passed,
        f"trainer's loss off by {whole:.1e}; fused off by {worst:.1e}, full logits by {full_worst:.1e}",
        f"loss and gradients ({', '.join(errors)}) on {count} real rows in {subject.compute_dtype}, against "
        f"full logits in float64{EQUAL_START if subject.starts_equal else ''}",
        f"the loss is not what the config says ({subject.config.loss.divergence}, temperature "
        f"{subject.config.loss.temperature:g}): full logits give {wanted:.6g}, the trainer {trainer:.6g}",
        trainer=whole,
        **{f"fused_{part}": pair[0] for part, pair in errors.items()},
        **{f"full_{part}": pair[1] for part, pair in errors.items()},
    )


@torch.no_grad()
def _trainer_loss(subject: Subject, module: StudentModule, rows: int) -> float:
    """Return what the trainer's module makes of the first `rows` supervised rows, in float32."""
    batch = subject.batch
    labels = batch.labels.clone().reshape(-1)
    labels[batch.rows[rows:]] = -100
    fewer = type(batch)(batch.input_ids, batch.document_lengths, labels.reshape(batch.labels.shape))
    return module.to(subject.device)(fewer, subject.contrary_states(batch)[:rows], rows)[0].item()


def _errors(
    subject: Subject, student_hidden: Tensor, teacher_hidden: Tensor, labels: Tensor, arguments: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Return the relative errors of (fused, full logits) against float64, of loss and gradients."""
    head, dtype = head_of(subject.student), subject.compute_dtype
    with_head = head.weight.numel() * 8 <= _MOST_HEAD_BYTES
    hidden, weight = student_hidden.to(dtype), head.weight.detach().to(dtype)
    bias = None if head.bias is None else head.bias.detach().to(dtype)

    def run(function: Callable, **options: Any) -> tuple[Tensor, ...]:
        inputs = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_(with_head)
        own = Head(inputs[1], bias, head.scale, head.softcap)
        out = function(inputs[0], own, teacher_hidden, subject.teacher_head, labels, **arguments, **options)
        out.loss.backward()
        return out.loss.detach(), inputs[0].grad, inputs[1].grad

    truth = run(reference_kd_loss, compute_dtype=torch.float64)
    runs = run(fused_kd_loss, memory_budget=_budget(subject)), run(reference_kd_loss)
    return {
        part: (_off(runs[0][index], truth[index]), _off(runs[1][index], truth[index]))
        for index, part in enumerate(("loss", "hidden", "head"))
        if truth[index] is not None
    }


def _off(value: Tensor, truth: Tensor) -> float:
    scale = truth.double().norm()
    return 0.0 if scale == 0 else ((value.double() - truth.double()).norm() / scale).item()


def _budget(subject: Subject) -> int:
    counts = [(one.numel(), one.numel() * one.requires_grad) for one in subject.student.parameters()]
    parameters, trained = map(sum, zip(*counts, strict=True))
    config, memory = subject.config, memory_for_this_process(subject.device)
    shards = config.student.ranks // config.student.replicate
    return loss_budget(config, subject.device.type, memory, parameters, trained, shards)
