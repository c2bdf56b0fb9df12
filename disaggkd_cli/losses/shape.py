"""The one builder of a loss's shape, for the loss itself and for the planner. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.losses.divergences import Divergence
from disaggkd_cli.losses.tiling import LossShape


@dataclass(frozen=True)
class SideProducts:
    """The matrix products of one model: its width, and bytes per element.

    Attributes:
        width: H.
        copy_bytes: of the converted copies that the products need; 0 where they need none.
        operand_bytes, gradient_bytes: of what the logits' and the gradients' products take.
    """

    width: int
    copy_bytes: int
    operand_bytes: int
    gradient_bytes: int


def products_of(width: int, input_bytes: int, on_gpu: bool) -> SideProducts:
    """Return what `matmul.choose_precision` decides for hidden states and a head of `input_bytes` per element.

    That is float32, or bfloat16, which GPUs multiply as it is and CPUs widen.
    """
    if input_bytes >= 4 or on_gpu:
        return SideProducts(width, 0, input_bytes, input_bytes)
    return SideProducts(width, 4, 4, 4)


def loss_shape(
    rows: int,
    shared: int,
    student_extra: int,
    teacher_extra: int,
    student: SideProducts,
    teacher: SideProducts,
    divergence: Divergence,
    *,
    hidden_bytes: int,
    result_bytes: int = 4,
    gathered: bool = False,
    joined: bool = False,
    adds_into_sums: bool = False,
    gradients: bool = True,
    hidden_gradient: bool = True,
    weight_gradient: bool = True,
    compiled: bool = True,
    device: str = "cpu",
) -> LossShape:
    """Return the shape of a loss of `rows` supervised rows over `shared` columns and those that one model has alone.

    Args:
        hidden_bytes: per element of the student's hidden states, and so of dH.
        result_bytes: per element of logits and sums.
        gathered: not every row is supervised, so windows are copies.
        joined: ranks hold one shard of the vocabulary each.
        adds_into_sums: the device adds products of narrower operands to wide sums without a buffer.
        gradients, hidden_gradient, weight_gradient, compiled, device: as in LossShape.
    """
    narrow = student.gradient_bytes != result_bytes
    return LossShape(
        rows=rows,
        shared=shared,
        student_extra=student_extra,
        teacher_extra=teacher_extra,
        student_width=student.width,
        teacher_width=teacher.width,
        element_bytes=result_bytes,
        student_copy_bytes=student.copy_bytes,
        teacher_copy_bytes=teacher.copy_bytes,
        operand_bytes=student.operand_bytes,
        gradient_copy_bytes=student.gradient_bytes if narrow else 0,
        hidden_copy=gathered or joined or hidden_bytes != result_bytes,
        gathered=gathered,
        weight_copy=narrow and not adds_into_sums,
        gradients=gradients,
        weight_gradient=weight_gradient,
        hidden_gradient=hidden_gradient,
        further_passes=divergence.passes(gradients) - 1,
        compiled=compiled,
        device=device,
    )
