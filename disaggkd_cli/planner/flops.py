"""Floating-point operations per token: 2 for each weight that a token is multiplied with, and those of attention."""

from __future__ import annotations

from disaggkd_cli.planner import loss as loss_model
from disaggkd_cli.planner.memory.heads import loss_work
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.shapes import GatedDeltaNet, LatentAttention, LayerShape, ModelShape
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

_ATTENTION = "causal softmax attention: scores and weighted values over S/2 keys on average, a window's keys at most"


def mean_context(sequence: int, window: int | None) -> float:
    """Keys that a token of a causal sequence attends to, on average."""
    if window is None or sequence <= window:
        return sequence / 2
    return window - window**2 / (2 * sequence)


def mixer_flops(layer: LayerShape, sequence: int) -> float:
    """Operations per token of one layer's token mixing, its projections apart."""
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNet):
        return 8.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim
    if isinstance(mixer, LatentAttention):
        return 2.0 * (mixer.q + mixer.heads * mixer.value_dim) * mean_context(sequence, None)
    return 4.0 * mixer.q * mean_context(sequence, mixer.window)


def forward_flops(shape: ModelShape, sequence: int) -> Term:
    """Operations of one token's forward through the layers; embedding and head are apart."""
    attention = sum(mixer_flops(layer, sequence) * count for layer, count in shape.layer_kinds().items())
    return term(
        f"forward FLOPs of {shape.name}",
        "2 * N_act + attention",
        _ATTENTION,
        N_act=count_parameters(shape).active_layers,
        attention=attention,
    )


def teacher_flops(work: Workload) -> Term:
    """Operations of a teacher for one token: its backbone's forward, no head."""
    return forward_flops(work.teacher, work.sequence)


def student_flops(work: Workload, *, fused: bool = True) -> Term:
    """Operations of a student for one token: forward, backward (twice that), recomputation, and the loss of the
    supervised rows."""
    forward = forward_flops(work.student, work.sequence)
    if fused:
        per_row = loss_work(work).flops_per_row
    else:
        student, teacher = work.student, work.teacher
        per_row = loss_model.full_logits(
            work.rows, student.vocabulary, teacher.vocabulary, student.hidden, teacher.hidden, work.divergence
        ).flops_per_row
    return term(
        "student FLOPs",
        "passes * forward + supervised * loss",
        "backward is twice forward; checkpointing adds one forward",
        passes=4 if work.checkpointing else 3,
        forward=forward.value,
        supervised=work.supervised,
        loss=per_row,
    )
