"""What a token costs to compute, by kind of work: matrix products, attention, delta nets, memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from disaggkd_cli.config.attention import EAGER
from disaggkd_cli.planner.memory.attention import kernel
from disaggkd_cli.planner.memory.heads import loss_work
from disaggkd_cli.planner.memory.layer_tensors import saved_per_token
from disaggkd_cli.planner.memory.projection import flops_per_row
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.shapes import ExpertMLP, GatedDeltaNet, LatentAttention, LayerShape, ModelShape
from disaggkd_cli.planner.terms import Term, term, total
from disaggkd_cli.planner.workload import Workload

_ATTENTION = "causal softmax attention: scores and weighted values over S/2 keys on average, a window's keys at most"

SCORE_BYTES = 26
"""Memory traffic for a head, token and key where attention forms its scores in memory, read from transformers' eager
code in 16 bits and not measured: scores written, read and written with the mask, read and written as float32
probabilities, read and written in 16 bits, read by the second product; sinks join and cut them once more."""


@dataclass(frozen=True)
class ForwardWork:
    """One token's forward through the layers; embedding and head are apart.

    Attributes:
        dense: FLOPs of matrix products outside of routed experts, eager attention's among them.
        experts: those of the experts that a token is sent to.
        attention: FLOPs of fused softmax attention.
        delta: FLOPs of gated delta nets beside their projections.
        saved: bytes that layers save for backward in bfloat16, the measure of pointwise memory traffic.
        scores: bytes of attention scores that pass through memory.
    """

    dense: float
    experts: float
    attention: float
    delta: float
    saved: float
    scores: float

    @property
    def flops(self) -> float:
        return self.dense + self.experts + self.attention + self.delta


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


@lru_cache(maxsize=256)
def forward_work(shape: ModelShape, sequence: int, wanted: str = "auto") -> ForwardWork:
    """What one token's forward takes, by kind of work.

    Args:
        shape: of the model.
        sequence: length that attention sees.
        wanted: `teacher.attention` or `student.attention`. Eager attention multiplies by every key, masked or not.
    """
    experts = attention = delta = saved = scores = products = 0.0
    for layer, count in shape.layer_kinds().items():
        if isinstance(layer.mlp, ExpertMLP):
            experts += 2.0 * 3 * shape.hidden * layer.mlp.width * layer.mlp.top_k * count
        mixing = mixer_flops(layer, sequence) * count
        if isinstance(layer.mixer, GatedDeltaNet):
            delta += mixing
        elif kernel(layer.mixer, wanted) == EAGER:
            products += mixing * sequence / mean_context(sequence, getattr(layer.mixer, "window", None))
            scores += SCORE_BYTES * layer.mixer.heads * sequence * count
        else:
            attention += mixing
        saved += total(saved_per_token(layer, shape.hidden, 2, 0, packed=False)) * count
    dense = 2.0 * count_parameters(shape).active_layers - experts + products
    return ForwardWork(dense, experts, attention, delta, saved, scores)


def forward_flops(shape: ModelShape, sequence: int, wanted: str = "auto") -> Term:
    """Operations of one token's forward through the layers; embedding and head are apart."""
    weights = count_parameters(shape).active_layers
    return term(
        f"forward FLOPs of {shape.name}",
        "2 * N_act + attention",
        _ATTENTION,
        N_act=weights,
        attention=forward_work(shape, sequence, wanted).flops - 2.0 * weights,
    )


def teacher_flops(work: Workload) -> Term:
    """Operations of a teacher for one token: its backbone's forward, no head."""
    return forward_flops(work.teacher, work.sequence, work.teacher_attention)


def loss_flops(work: Workload, *, fused: bool) -> float:
    """Operations of the loss for one supervised row: both heads' products, forward and backward."""
    if fused:
        return loss_work(work).flops_per_row
    student, teacher = work.student, work.teacher
    return 6.0 * student.hidden * student.vocabulary + 2.0 * teacher.hidden * teacher.vocabulary


def backward_passes(work: Workload) -> float:
    """Backward in units of a forward's matrix products: gradients of the inputs, and of the weights that are trained;
    one more forward where activations are checkpointed. None where no layer is trained."""
    if work.layer_trained == 0:
        return 0.0
    return 1 + min(work.layer_trained, 1.0) + (1 if work.checkpointing else 0)


def student_flops(work: Workload, *, fused: bool = True) -> Term:
    """Operations of a student for one token: forward, backward, recomputation, and the loss of the supervised rows."""
    return term(
        "student FLOPs",
        "passes * forward + supervised * loss",
        "forward, as much for the gradients of inputs, as much for those of trained weights, and once more under "
        "checkpointing; attention's backward, which is two and a half times its forward, is counted as twice",
        passes=1 + backward_passes(work),
        forward=forward_flops(work.student, work.sequence, work.student_attention).value,
        supervised=work.supervised,
        loss=loss_flops(work, fused=fused) + flops_per_row(work),
    )
