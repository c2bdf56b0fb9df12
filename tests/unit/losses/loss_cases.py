"""Inputs of losses, and what two losses make of the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disaggkd_cli.losses import Head, LossOutput


@dataclass
class Case:
    """Inputs of one loss; leaves require gradients."""

    student_hidden: Tensor
    student_head: Head
    teacher_hidden: Tensor
    teacher_head: Head
    labels: Tensor | None

    def run(self, loss, **options) -> LossOutput:
        """Call a loss on these inputs."""
        return loss(
            self.student_hidden, self.student_head, self.teacher_hidden, self.teacher_head, self.labels, **options
        )

    def gradients(self) -> list[Tensor]:
        """Gradients of hidden states, head weight, and bias if there is one."""
        leaves = [self.student_hidden, self.student_head.weight, self.student_head.bias]
        return [leaf.grad for leaf in leaves if leaf is not None]

    def copy(self, dtype: torch.dtype | None = None) -> Case:
        """Return fresh leaves of the same values, in `dtype` if one is given."""

        def leaf(tensor: Tensor | None, needs: bool) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.detach().to(dtype or tensor.dtype).clone().requires_grad_(needs)

        def head(of: Head, needs: bool) -> Head:
            return Head(leaf(of.weight, needs), leaf(of.bias, needs), of.scale, of.softcap)

        return Case(
            leaf(self.student_hidden, True),
            head(self.student_head, True),
            leaf(self.teacher_hidden, False),
            head(self.teacher_head, False),
            self.labels,
        )


def make_case(
    seed: int, rows: int = 37, vocabulary: int = 53, teacher_vocabulary: int | None = None, student_width: int = 7,
    teacher_width: int = 11, dtype: torch.dtype = torch.float64, bias: bool = False, scale: float = 1.0,
    softcap: float | None = None, labels: bool = True, masked: bool = False,
) -> Case:  # fmt: skip
    """Return random inputs: unit hidden states and weights, so that logits differ by several units."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    teacher_vocabulary = teacher_vocabulary or vocabulary
    student_head = Head(normal(vocabulary, student_width), normal(vocabulary) if bias else None, scale, softcap)
    teacher_bias = normal(teacher_vocabulary) if bias else None
    teacher_head = Head(normal(teacher_vocabulary, teacher_width), teacher_bias, scale, softcap)
    ids = torch.randint(0, vocabulary, (rows,), generator=draw) if labels else None
    if masked:
        ids[::3] = -100
    return Case(normal(rows, student_width), student_head, normal(rows, teacher_width), teacher_head, ids).copy()


def logits_case(teacher: Tensor, student: Tensor, labels: Tensor | None = None) -> Case:
    """Return a case whose logits are the given ones [R, V]: hidden states of identity heads."""
    eye = torch.eye(teacher.shape[1], dtype=teacher.dtype)
    student_eye = torch.eye(student.shape[1], dtype=student.dtype)
    return Case(student.clone(), Head(student_eye), teacher.clone(), Head(eye), labels).copy()


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    found, truth = found.double(), truth.double()
    return ((found - truth).norm() / truth.norm().clamp(min=1e-300)).item()
