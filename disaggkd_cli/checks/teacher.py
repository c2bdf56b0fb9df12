"""Has the teacher anything to teach: are its weights numbers, and is it better at the texts than a guess?"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from disaggkd_cli.checks.result import CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.losses import Head
from disaggkd_cli.losses.heads import apply_head
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.models.values import verify_weights
from disaggkd_cli.training.evaluation import no_better_than_guessing


@torch.no_grad()
def check_teacher(subject: Subject) -> CheckResult:
    """Look at every weight of both models, and compare the teacher's loss on real rows with a guess's.

    Raises:
        UserError: naming the tensors that hold NaN or infinities.
    """
    for name, model in (("the teacher", subject.teacher), ("the student", subject.student)):
        verify_weights(model, name)
    batch = subject.batch
    loss = _cross_entropy(subject.teacher_states(batch), subject.teacher_head, batch.row_labels)
    states = hidden_states(backbone_of(subject.student), batch.input_ids, batch.position_ids)
    rows = states.reshape(-1, states.shape[-1])[batch.rows]
    student = _cross_entropy(rows, head_of(subject.student), batch.row_labels)
    vocabulary = subject.teacher_head.weight.shape[0]
    guess = math.log(vocabulary)
    remark = "; the student does better already: are they the right way round?" if loss > student + 1e-3 else ""
    return judge(
        not no_better_than_guessing(loss, vocabulary),
        f"{loss:.2f} nats; guessing {guess:.2f}, the student {student:.2f}",
        f"cross-entropy on {len(batch.rows)} supervised rows of the training texts{remark}",
        "the teacher is no better than guessing, so nothing good can be learnt from it; look at teacher.model's "
        "weights, its tokenizer, and the texts",
        teacher_loss=loss,
        student_loss=student,
        guess=guess,
    )


def _cross_entropy(hidden: Tensor, head: Head, labels: Tensor) -> float:
    """Return the mean over the labels that the head knows, in nats."""
    known = labels < head.weight.shape[0]
    logits = apply_head(hidden[known].to(head.weight.dtype), head).float()
    return F.cross_entropy(logits, labels[known]).item()
