"""Is each model's head what the loss takes it for?"""

from __future__ import annotations

import torch
from torch import nn

from disaggkd_cli.checks.result import FAIL, CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.losses.heads import apply_head
from disaggkd_cli.models import backbone_of, head_of, hidden_states, verify_split


def check_teacher_head(subject: Subject) -> CheckResult:
    """Compare the teacher's logits with those of the head that the student would hold."""
    return _compare(subject, subject.teacher, subject.teacher_head, f"teacher.model {subject.config.teacher.model}")


def check_student_head(subject: Subject) -> CheckResult:
    """Compare the student's logits with those of its split."""
    fresh = subject.config.student.from_config is not None
    return _compare(subject, subject.student, head_of(subject.student), "the student", fresh=fresh)


@torch.no_grad()
def _compare(subject: Subject, model: nn.Module, head: Head, name: str, *, fresh: bool = False) -> CheckResult:
    figure = describe(head)
    try:
        verify_split(model, head_of(model), name, fresh=fresh)
    except UserError as error:
        return CheckResult(FAIL, figure, str(error))
    batch = subject.batch
    own = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    own = own.reshape(-1, own.shape[-1])[batch.rows]
    states = hidden_states(backbone_of(model), batch.input_ids, batch.position_ids)
    ours = apply_head(states.reshape(-1, states.shape[-1])[batch.rows], head)
    difference = ((ours.double() - own.double()).abs().max() / own.double().abs().max().clamp_min(1e-12)).item()
    agreement = (ours.argmax(-1) == own.argmax(-1)).double().mean().item()
    tolerance = 16 * torch.finfo(own.dtype).eps
    return judge(
        difference <= tolerance,
        f"differs by {difference:.1e}; {figure}",
        f"cap(scale · (hidden · weight + bias)) against {type(model).__name__}'s own logits on {len(own)} real rows",
        f"{name} does something else to its logits (tolerance {tolerance:.1e}; top-1 agrees in {agreement:.1%})",
        difference=difference,
        tolerance=tolerance,
        top1_agreement=agreement,
    )


def describe(head: Head) -> str:
    """Return a head in a few words, such as `scale 0.25, soft cap 30, bias`."""
    parts = [f"scale {head.scale:g}"] if head.scale != 1.0 else []
    parts += [f"soft cap {head.softcap:g}"] if head.softcap is not None else []
    parts += ["bias"] if head.bias is not None else []
    return ", ".join(parts) or "plain head"
