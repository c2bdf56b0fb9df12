"""What both losses return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss and its parts. Every part is a sum over the supervised rows, divided by `num_tokens`.

    So the parts of several micro-batches or ranks add up when all were given the same global `num_tokens`.

    Attributes:
        loss: differentiable scalar, `kd_weight * temperature**2 * kd + ce_weight * ce`.
        kd: the divergence itself, without temperature**2 and without weight. Detached.
        ce: cross-entropy at temperature 1 over the student's whole vocabulary; zero without labels. Detached.
        top1_agreement: share of rows where the likeliest shared id of student and teacher is the same; of several
            that are equally likely, the first counts. Detached.
        dropped_teacher_mass: the teacher's probability, at the loss's temperature, on ids that the student lacks.
            Detached.
        dropped_student_mass: the student's probability, at that temperature, on ids that the teacher lacks. Detached.
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor
    top1_agreement: Tensor
    dropped_teacher_mass: Tensor
    dropped_student_mass: Tensor
