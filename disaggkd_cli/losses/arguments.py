"""What the losses accept, and what they say about the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses.divergences import DIVERGENCES, divergence_named
from disaggkd_cli.losses.heads import Head, is_dtensor

IGNORED_LABEL = -100


class LossArgumentError(UserError, ValueError):
    """An argument of a loss that can't be right; the message names the argument and the mend."""


def check_hyperparameters(divergence: str, temperature: float, beta: float, kd_weight: float, ce_weight: float) -> None:
    """Raise LossArgumentError unless the numbers make a loss."""
    if divergence not in DIVERGENCES:
        raise LossArgumentError(f"divergence={divergence!r} is unknown; it is one of {', '.join(DIVERGENCES)}")
    if not 0 < temperature < float("inf"):
        raise LossArgumentError(f"temperature={temperature!r} must be a positive number")
    for name, weight in (("kd_weight", kd_weight), ("ce_weight", ce_weight)):
        if not 0 <= weight < float("inf"):
            raise LossArgumentError(f"{name}={weight!r} must be zero or a positive number")
    wrong = divergence_named(divergence).wrong_beta(beta)
    if wrong:
        raise LossArgumentError(wrong)


def check_tensors(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    labels: Tensor | None,
    ce_weight: float,
) -> None:
    """Raise LossArgumentError unless shapes, dtypes and devices fit together."""
    for side, hidden, head in (("student", student_hidden, student_head), ("teacher", teacher_hidden, teacher_head)):
        _check_side(side, hidden, head)
    if len(student_hidden) != len(teacher_hidden):
        raise LossArgumentError(
            f"student_hidden has {len(student_hidden)} rows and teacher_hidden {len(teacher_hidden)}; "
            "row i of both must be the same token position"
        )
    if student_hidden.device != teacher_hidden.device:
        raise LossArgumentError(
            f"student_hidden is on {student_hidden.device} and teacher_hidden on {teacher_hidden.device}; move one"
        )
    if labels is None:
        if ce_weight != 0:
            raise LossArgumentError(f"ce_weight={ce_weight!r} needs labels; give them, or set ce_weight to 0")
        return
    if tuple(labels.shape) != (len(student_hidden),):
        raise LossArgumentError(f"labels must be [{len(student_hidden)}], one for each row; it is {list(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex():
        raise LossArgumentError(f"labels are token ids and must be integers (int64); they are {labels.dtype}")
    if labels.device != student_hidden.device:
        raise LossArgumentError(
            f"labels are on {labels.device} and student_hidden on {student_hidden.device}; move one"
        )


def token_count(num_tokens: int | float | Tensor | None, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the normaliser as a scalar tensor: `num_tokens`, or the supervised rows; at least one, so that none gives
    zero.

    Raises:
        LossArgumentError: a negative or many-valued `num_tokens`.
    """
    if num_tokens is None:
        num_tokens = rows
    if not isinstance(num_tokens, Tensor):
        if num_tokens < 0:
            raise LossArgumentError(f"num_tokens={num_tokens!r} must not be negative")
        return torch.full((), max(float(num_tokens), 1.0), device=device, dtype=dtype)
    if num_tokens.numel() != 1:
        raise LossArgumentError(f"num_tokens must be one number; it has {num_tokens.numel()}")
    return num_tokens.detach().to(device=device, dtype=dtype).reshape(()).clamp(min=1)


def _check_side(side: str, hidden: Tensor, head: Head) -> None:
    if not isinstance(head, Head):
        raise LossArgumentError(f"the {side} head must be a Head(weight, ...); it is a {type(head).__name__}")
    named = {f"{side}_hidden": hidden, f"the {side} head's weight": head.weight, f"the {side} head's bias": head.bias}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if is_dtensor(tensor):
            raise LossArgumentError(
                f"{name} is a DTensor. Call the loss inside the forward of the FSDP module that owns the head, where "
                "its parameters are plain and whole, or pass local shards (.to_local()) with group= for a "
                "vocabulary-parallel loss"
            )
        if not tensor.is_floating_point():
            raise LossArgumentError(f"{name} must be of a floating dtype; it is {tensor.dtype}")
        if tensor.device != hidden.device:
            raise LossArgumentError(f"{name} is on {tensor.device} and {side}_hidden on {hidden.device}; move one")
    if hidden.dim() != 2:
        raise LossArgumentError(
            f"{side}_hidden must be [rows, width]; it is {list(hidden.shape)}. Flatten batch and sequence"
        )
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise LossArgumentError(
            f"the {side} head's weight is {list(head.weight.shape)} and {side}_hidden {list(hidden.shape)}; "
            "the weight must be [vocabulary, width] with the same width"
        )
    if head.bias is not None and tuple(head.bias.shape) != (head.weight.shape[0],):
        raise LossArgumentError(
            f"the {side} head's bias must be [{head.weight.shape[0]}]; it is {list(head.bias.shape)}"
        )
    if head.softcap is not None and not head.softcap > 0:
        raise LossArgumentError(f"the {side} head's softcap must be positive or None; it is {head.softcap!r}")
