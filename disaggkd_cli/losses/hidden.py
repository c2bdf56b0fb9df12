"""A loss on the final hidden states themselves: the student's, projected to the teacher's width, against the teacher's.

Nothing more travels for it: the teacher's final hidden states are there for the divergence. The projection is learned
with the student and is no part of it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from disaggkd_cli.losses.arguments import LossArgumentError
from disaggkd_cli.losses.hidden_names import COSINE, HIDDEN_LOSSES


def fresh_projection(student_width: int, teacher_width: int, seed: int) -> Tensor:
    """Return a new projection [H_t, H_s] in float32, a function of its arguments alone, on the CPU.

    Uniform in ±1/sqrt(H_s), as a linear layer begins.
    """
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(student_width)
    return torch.empty(teacher_width, student_width).uniform_(-bound, bound, generator=generator)


def hidden_loss(
    student_hidden: Tensor, teacher_hidden: Tensor, projection: Tensor, kind: str, num_tokens: int | Tensor
) -> Tensor:
    """Return the sum over rows of the distance between projected and teacher's states, divided by `num_tokens`.

    Args:
        student_hidden: [R, H_s] of the supervised rows.
        teacher_hidden: [R, H_t] of the same rows; gets no gradient.
        projection: [H_t, H_s]; a row's projected state is `projection @ row`, without a bias.
        kind: `cosine`: 1 - cosine similarity; `mse`: the mean over H_t of the squared difference.
        num_tokens: the normaliser, as in the divergence: supervised rows of the whole optimizer step.

    Returns:
        A scalar in float32, or float64 where any input is; the product is in the projection's dtype. Zero, with
        gradients of zero, where there are no rows.

    Raises:
        LossArgumentError: shapes that do not fit, or an unknown kind.
    """
    _check(student_hidden, teacher_hidden, projection, kind)
    wide = any(one.dtype == torch.float64 for one in (student_hidden, teacher_hidden, projection))
    dtype = torch.float64 if wide else torch.float32
    projected = F.linear(student_hidden.to(projection.dtype), projection).to(dtype)
    wanted = teacher_hidden.detach().to(dtype)
    if kind == COSINE:
        distances = 1 - F.cosine_similarity(projected, wanted, dim=-1)
    else:
        distances = (projected - wanted).square().mean(-1)
    return distances.sum() / num_tokens


def _check(student_hidden: Tensor, teacher_hidden: Tensor, projection: Tensor, kind: str) -> None:
    if kind not in HIDDEN_LOSSES:
        raise LossArgumentError(f"kind={kind!r} is unknown; it is one of {', '.join(HIDDEN_LOSSES)}")
    for name, hidden in (("student_hidden", student_hidden), ("teacher_hidden", teacher_hidden)):
        if hidden.ndim != 2:
            raise LossArgumentError(f"{name} must be [rows, width]; it is {list(hidden.shape)}")
    if len(student_hidden) != len(teacher_hidden):
        raise LossArgumentError(
            f"student_hidden has {len(student_hidden)} rows and teacher_hidden {len(teacher_hidden)}; "
            "row i of both must be the same token position"
        )
    wanted = [teacher_hidden.shape[1], student_hidden.shape[1]]
    if list(projection.shape) != wanted:
        raise LossArgumentError(
            f"projection must be {wanted}, teacher's by student's width; it is {list(projection.shape)}"
        )
