"""The loss in plain torch over full logits: the oracle of the fused loss, and the baseline of every comparison."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from disaggkd_cli.losses.arguments import (
    IGNORED_LABEL,
    LossArgumentError,
    check_hyperparameters,
    check_tensors,
    token_count,
)
from disaggkd_cli.losses.divergences import divergence_named
from disaggkd_cli.losses.heads import Head, apply_head, gathered
from disaggkd_cli.losses.output import LossOutput


def reference_kd_loss(
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
    compute_dtype: torch.dtype | None = None,
    supervised: Tensor | Literal["all"] | None = None,
) -> LossOutput:
    """Return the loss of `fused_kd_loss`, computed over full logits with autograd.

    Arguments are those of `fused_kd_loss`; `memory_budget` is accepted and has no effect here, and `group` must be
    None.

    Args:
        compute_dtype: dtype of everything (`torch.float64` for an oracle). By default the matrix products run in the
            dtype of their inputs, as a training loop's would, and the rest in float32 at least.

    Raises:
        LossArgumentError: an argument can't be right.
    """
    del memory_budget
    if group is not None:
        raise LossArgumentError(
            "reference_kd_loss needs the whole vocabulary on each rank; group= works with fused_kd_loss"
        )
    teacher_head = gathered(teacher_head) if isinstance(teacher_head, Head) else teacher_head
    check_hyperparameters(divergence, temperature, beta, kd_weight, ce_weight)
    check_tensors(student_hidden, student_head, teacher_hidden, teacher_head, labels, ce_weight)
    if labels is not None and not isinstance(supervised, str):
        counts = labels != IGNORED_LABEL if supervised is None else supervised
        student_hidden, teacher_hidden, labels = student_hidden[counts], teacher_hidden[counts], labels[counts].long()

    student_logits = _logits(student_hidden, student_head, compute_dtype)
    with torch.no_grad():
        teacher_logits = _logits(teacher_hidden, teacher_head.detached(), compute_dtype)
    dtype = torch.promote_types(student_logits.dtype, teacher_logits.dtype)
    student_logits, teacher_logits = student_logits.to(dtype), teacher_logits.to(dtype)

    shared = min(student_logits.shape[1], teacher_logits.shape[1])
    # This is also the baseline of comparisons, so it makes no copy that a training loop would not make.
    student_tempered = student_logits if temperature == 1 else student_logits / temperature
    teacher_tempered = teacher_logits if temperature == 1 else teacher_logits / temperature
    log_q = F.log_softmax(student_tempered[:, :shared], -1)
    log_p = F.log_softmax(teacher_tempered[:, :shared], -1)
    normaliser = token_count(num_tokens, len(student_hidden), student_hidden.device, dtype)
    kd = divergence_named(divergence).of_rows(log_p, log_q, beta).sum() / normaliser
    if labels is None:
        ce = torch.zeros_like(kd)
    else:
        ce = F.cross_entropy(student_logits, labels, reduction="sum") / normaliser
    with torch.no_grad():
        first_q, first_p = (_first_likeliest(logits[:, :shared]) for logits in (student_logits, teacher_logits))
        agreement = (first_q == first_p).to(dtype).sum() / normaliser
        dropped = [_extra_mass(tempered, shared) / normaliser for tempered in (teacher_tempered, student_tempered)]
    loss = kd_weight * temperature**2 * kd + ce_weight * ce
    return LossOutput(loss, kd.detach(), ce.detach(), agreement, *dropped)


def _logits(hidden: Tensor, head: Head, compute_dtype: torch.dtype | None) -> Tensor:
    if compute_dtype is not None:
        bias = None if head.bias is None else head.bias.to(compute_dtype)
        head = Head(head.weight.to(compute_dtype), bias, head.scale, head.softcap)
        hidden = hidden.to(compute_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return apply_head(hidden, head)
    logits = apply_head(hidden, head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _extra_mass(tempered: Tensor, shared: int) -> Tensor:
    """Return the probability, summed over rows, on ids that only this side has."""
    if tempered.shape[1] == shared:
        return tempered.new_zeros(())
    return F.softmax(tempered, -1)[:, shared:].sum()


def _first_likeliest(logits: Tensor) -> Tensor:
    """The first of the likeliest ids of each row [R]."""
    return logits.argmax(-1) if logits.numel() else logits.new_zeros(len(logits))
