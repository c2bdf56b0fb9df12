"""Seconds that one GPU computes for a token, by kind of work, at the rates that published runs achieved."""

from __future__ import annotations

from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.efficiency import KERNELS, Kernels
from disaggkd_cli.planner.flops import ForwardWork
from disaggkd_cli.planner.hardware import Gpu
from disaggkd_cli.planner.terms import Term, term

_ATTENTION_BACKWARD = 2.5
"""Of its forward: fused attention's backward computes the scores again."""


def compute_seconds(
    name: str,
    gpu: Gpu,
    forward: ForwardWork,
    *,
    sequence: int,
    passes: float = 1.0,
    recomputed: bool = False,
    head: float = 0.0,
    logits: float = 0.0,
    element_bytes: int = 2,
    compiled: bool = False,
    float8: bool = False,
    kernels: Kernels = KERNELS,
) -> Term:
    """Return the seconds of one token.

    Args:
        name: of the term.
        gpu: whose catalogue entry gives the largest measured matrix rate and the memory's.
        forward: the token's forward through the layers.
        sequence: length that attention sees.
        passes: forward and backward in units of a forward's matrix products.
        recomputed: whether one of the passes is a forward of checkpointed layers.
        head: FLOPs of heads and loss.
        logits: bytes of memory traffic of the loss.
        element_bytes: of compute; float32 without TF32 is slower in matrix products and moves twice the bytes.
        compiled: whether layers run under `torch.compile`.
        float8: whether matrix products of layers run in float8; for published rows.
        kernels: what is achieved.
    """
    rates = kernels.of(gpu.architecture)
    slower = constant("float32_slowdown") if element_bytes == 4 else 1.0
    forwards = (1 if passes else 0) + (1 if recomputed else 0)
    return term(
        name,
        "((p * (N + X / x + D / d) + H) / u + a * A * (1 + S_0 / S) / e) * f / C + (p * (q * Q + Y) * b / 2 + Z) / M",
        "matrix products of layers (N) and of routed experts (X), delta nets (D) and heads (H), attention (A) by "
        "length, and memory traffic of pointwise kernels (Q), of eager attention's scores (Y) and of the loss (Z), at "
        "rates fitted to published runs (docs/planner.md)"
        + ("" if rates.fitted else f"; none of {gpu.name}'s architecture, so Hopper's"),
        p=passes,
        N=forward.dense,
        X=forward.experts,
        x=kernels.experts,
        D=forward.delta,
        d=kernels.delta_net,
        H=head,
        C=gpu.matmul_tflops * 1e12,
        u=rates.matmul * (kernels.float8 if float8 else 1),
        f=slower,
        a=forwards + (_ATTENTION_BACKWARD if passes > forwards else 0),
        A=forward.attention,
        S_0=rates.half_length,
        S=sequence,
        e=rates.attention,
        q=rates.pointwise * (kernels.compiled if compiled else 1),
        Q=forward.saved,
        Y=forward.scores,
        b=element_bytes,
        Z=logits,
        M=gpu.hbm_tb_per_s * 1e12 * constant("hbm_efficiency"),
    )
