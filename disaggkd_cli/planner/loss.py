"""Memory and matrix-product work of the loss: over full logits, and fused in windows of rows and shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from disaggkd_cli.losses.device_costs import device_key
from disaggkd_cli.losses.divergences import divergence_named
from disaggkd_cli.losses.shape import loss_shape, products_of
from disaggkd_cli.losses.tiling import LossShape, choose_tiling
from disaggkd_cli.planner.constants import LOW_PRECISION_LOGITS_BYTES, TEMPERED_LOGITS_BYTES
from disaggkd_cli.planner.terms import Term, term

_UNKNOWN_CAPABILITY = (9, 0)
"""A GPU whose costs are not known is planned as the newest that is."""


@dataclass(frozen=True)
class LossWork:
    """The loss of one micro-batch on one rank.

    Attributes:
        scratch: bytes beside inputs and gradients.
        flops_per_row: matrix products, forward and backward.
        window, shard: the tile of the fused loss; zero for full logits.
    """

    scratch: Term
    flops_per_row: float
    window: int = 0
    shard: int = 0


def full_logits(
    rows: int,
    student_vocabulary: int,
    teacher_vocabulary: int,
    student_width: int,
    teacher_width: int,
    divergence: str,
    temperature: float = 1.0,
    compute_bytes: int = 4,
) -> LossWork:
    """The loss over full logits, `loss.implementation: full`: `2 V (3 H_s + H_t)` FLOPs a row."""
    scratch = term(
        "full logits",
        "c * R * V",
        "c traced with MemTracker on our reference loss, float32 logits",
        c=divergence_named(divergence).full_logits_bytes
        + (TEMPERED_LOGITS_BYTES if temperature != 1 else 0.0)
        + (LOW_PRECISION_LOGITS_BYTES if compute_bytes == 2 else 0.0),
        R=rows,
        V=max(student_vocabulary, teacher_vocabulary),
    )
    flops = 6.0 * student_width * student_vocabulary + 2.0 * teacher_width * teacher_vocabulary
    return LossWork(scratch, flops)


def fused(
    rows: int,
    student_vocabulary: int,
    teacher_vocabulary: int,
    student_width: int,
    teacher_width: int,
    divergence: str,
    memory_budget: int,
    compute_bytes: int,
    teacher_bytes: int,
    *,
    device: str = "H100-SXM",
    head_trained: bool = True,
    compiled: bool = True,
    joined: bool = False,
) -> LossWork:
    """The fused loss: its scratch never exceeds `memory_budget`; the tile is the one that the loss itself chooses.

    `device` is `cpu` or the name of a GPU. With `joined`, ranks hold one shard of the vocabulary each, and the numbers
    are those of one rank.

    Raises:
        UserError: when not even the smallest tile fits the budget.
    """
    shared = min(student_vocabulary, teacher_vocabulary)
    on_gpu = device != "cpu"
    shape = loss_shape(
        max(rows, 1),
        shared,
        student_vocabulary - shared,
        teacher_vocabulary - shared,
        products_of(student_width, compute_bytes, on_gpu),
        products_of(teacher_width, teacher_bytes, on_gpu),
        divergence_named(divergence),
        hidden_bytes=compute_bytes,
        joined=joined,
        weight_gradient=head_trained,
        compiled=compiled,
        device=device_key(device, _UNKNOWN_CAPABILITY) if on_gpu else "cpu",
    )
    tiling = _tiling(shape, memory_budget)
    scratch = term(
        "fused-loss scratch",
        "scratch",
        "the tiling that the loss chooses within loss.memory_budget (losses/tiling.py)",
        scratch=tiling.scratch_bytes,
    )
    return LossWork(scratch, tiling.gemm_flops / max(rows, 1), tiling.window, tiling.shard)


@lru_cache(maxsize=4096)
def _tiling(shape: LossShape, memory_budget: int):
    return choose_tiling(shape, memory_budget)
