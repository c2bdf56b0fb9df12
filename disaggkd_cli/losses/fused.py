"""The fused loss: the front door."""

from __future__ import annotations

from torch import Tensor

from disaggkd_cli.losses.heads import Head
from disaggkd_cli.losses.output import LossOutput
from disaggkd_cli.losses.reference import reference_kd_loss


def fused_kd_loss(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    labels: Tensor | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    num_tokens: int | float | Tensor | None = None,
    group: object | None = None,
    memory_budget: int | str | None = None,
) -> LossOutput:
    """Return the distillation loss; for now by way of full logits."""
    return reference_kd_loss(
        student_hidden, student_head, teacher_hidden, teacher_head, labels, divergence, temperature, beta,
        kd_weight, ce_weight, num_tokens, group, memory_budget,
    )  # fmt: skip
