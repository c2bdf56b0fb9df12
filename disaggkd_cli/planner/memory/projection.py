"""The projection of hidden states of `loss.hidden_weight`: H_t x H_s in the student's root unit, float32 masters."""

from __future__ import annotations

from disaggkd_cli.losses.hidden_names import COSINE, MSE
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

_PARAMETER = "loss.hidden_weight: H_t x H_s parameters beside the student's"


def parameters(work: Workload) -> int:
    """Parameters of the projection; 0 without one."""
    return work.teacher.hidden * work.student.hidden if work.hidden_loss else 0


def states(work: Workload, *, gradients: bool) -> list[Term]:
    """This rank's shard of its masters, Adam's moments and, where they are reduced, gradients."""
    if not work.hidden_loss:
        return []
    return [
        term(
            "hidden projection: masters, moments, gradient",
            "(4 + o + 4 * reduced) * H_t * h / W",
            _PARAMETER,
            o=work.optimizer_bytes,
            reduced=int(gradients),
            H_t=work.teacher.hidden,
            h=work.student.hidden,
            W=work.shard_ranks,
        )
    ]


def reduction(work: Workload) -> list[Term]:
    """Its whole gradient and the input of its reduction."""
    if not work.hidden_loss:
        return []
    values = {"H_t": work.teacher.hidden, "h": work.student.hidden, "b": work.student_bytes}
    return [term("reduction of the hidden projection", "(b + 4) * H_t * h", _PARAMETER, **values)]


def rows(work: Workload) -> list[Term]:
    """Projected and teacher's rows in float32, and what their distance and its gradient take."""
    if not work.hidden_loss:
        return []
    return [
        term(
            "hidden loss",
            "4 * copies * R * H_t",
            "losses/hidden.py, for each row of this rank's own: projected, teacher's, and gradients in float32; peak "
            "of tensors counted on the CPU",
            copies=COPIES[work.hidden_loss],
            R=work.rows,
            H_t=work.teacher.hidden,
        )
    ]


COPIES = {COSINE: 6, MSE: 5}
"""Tensors of R x H_t that are alive at once, in the loss's forward or in its own backward; a test counts them."""


def flops_per_row(work: Workload) -> float:
    """Operations of one supervised row: the product, and its two gradients."""
    return 6.0 * parameters(work)
