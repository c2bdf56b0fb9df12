"""The divergences: names, definitions, and the pieces that the fused loss needs. The only owner of a formula.

`p` is the teacher and `q` the student, both softmax of logits over the temperature. For D = sum phi(p, q), the gradient
with respect to the student's tempered logits is `q * (a - E_q[a])` with `a = d phi / d q`: one number for each row is
all that a tile must know of the other tiles beside the two log-sum-exps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIVERGENCES = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "symmetric_kl",
    "total_variation",
)
KULLBACK_LEIBLER = ("forward_kl", "reverse_kl", "symmetric_kl")
"""Divergences whose value and row baseline follow from the first pass over the logits."""
_NEGLIGIBLE = 1e-30
"""A probability whose share in a mixture may underflow to zero in float32; its terms are too small to count."""


def row_divergence(divergence: str, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row [R], from log-probabilities [R, V] of teacher and student: the definition.

    Differentiable by autograd; log-probabilities of minus infinity (masked ids) are allowed.
    """
    if divergence == "forward_kl":
        return _kl(log_p, log_q)
    if divergence == "reverse_kl":
        return _kl(log_q, log_p)
    if divergence == "symmetric_kl":
        return combine_kl(divergence, _kl(log_p, log_q), _kl(log_q, log_p), beta)
    if divergence == "jsd":
        log_m = _log_mixture(log_p, log_q, beta)
        return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    if divergence == "skewed_forward_kl":
        return _kl(log_p, _log_mixture(log_p, log_q, beta))
    if divergence == "skewed_reverse_kl":
        return _kl(log_q, _log_mixture(log_q, log_p, beta))
    if divergence == "total_variation":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    raise ValueError(f"unknown divergence {divergence!r}")


def combine_kl(divergence: str, forward: Tensor, reverse: Tensor, beta: float) -> Tensor:
    """Return the divergence from KL(p || q) and KL(q || p)."""
    if divergence == "forward_kl":
        return forward
    if divergence == "reverse_kl":
        return reverse
    # A weight of zero leaves its part out, also where that part is infinite.
    if beta in (0, 1):
        return forward if beta == 1 else reverse
    return beta * forward + (1 - beta) * reverse


def row_terms(
    divergence: str, p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return elementwise terms [R, V]; their row sums are the divergence, and the row baseline that
    `tempered_gradient` asks for.

    For mixtures and total variation; the KLs have theirs from the first pass. A term of a divergence of `a` from `m` is
    written `a log(a / m) - a + m`: the same sum, but no term is negative and errors of the normalisers cancel.
    """
    if divergence == "total_variation":
        return 0.5 * (p - q).abs(), q * torch.sign(q - p)
    if divergence == "jsd":
        m = beta * p + (1 - beta) * q
        log_m = torch.log(m)
        of_q = torch.where(q > _NEGLIGIBLE, q * (log_q - log_m), 0.0) - q + m
        of_p = torch.where(p > _NEGLIGIBLE, p * (log_p - log_m), 0.0) - p + m
        return beta * of_p + (1 - beta) * of_q, of_q
    if divergence == "skewed_forward_kl":
        m = beta * p + (1 - beta) * q
        of_p = torch.where(p > _NEGLIGIBLE, p * (log_p - torch.log(m)), 0.0) - p + m
        return of_p, torch.where(m > 0, q * p / m, 0.0)
    if divergence == "skewed_reverse_kl":
        m = beta * q + (1 - beta) * p
        log_ratio = log_q - torch.log(m)
        of_q = torch.where(q > _NEGLIGIBLE, q * log_ratio, 0.0) - q + m
        return of_q, torch.where(q > _NEGLIGIBLE, q * (log_ratio - beta * q / m), 0.0)
    raise ValueError(f"{divergence!r} has no row terms")


def tempered_gradient(
    divergence: str, p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float, row_baseline: Tensor
) -> Tensor:
    """Return the gradient [R, V] of the divergence with respect to the student's logits over the temperature.

    Args:
        row_baseline: [R, 1]. KL(q || p) for the KLs (forward KL makes no use of it), else the second sum of
            `row_terms`.
    """
    if divergence == "forward_kl":
        return q - p
    if divergence == "reverse_kl":
        return torch.where(q > 0, q * (log_q - log_p - row_baseline), 0.0)
    if divergence == "symmetric_kl":
        return beta * (q - p) + (1 - beta) * torch.where(q > 0, q * (log_q - log_p - row_baseline), 0.0)
    if divergence == "total_variation":
        return 0.5 * q * (torch.sign(q - p) - row_baseline)
    if divergence == "jsd":
        log_m = torch.log(beta * p + (1 - beta) * q)
        return (1 - beta) * torch.where(q > _NEGLIGIBLE, q * (log_q - log_m - row_baseline), 0.0)
    if divergence == "skewed_forward_kl":
        m = beta * p + (1 - beta) * q
        return (1 - beta) * q * (row_baseline - torch.where(m > 0, p / m, 0.0))
    if divergence == "skewed_reverse_kl":
        m = beta * q + (1 - beta) * p
        return torch.where(q > _NEGLIGIBLE, q * (log_q - torch.log(m) - beta * q / m - row_baseline), 0.0)
    raise ValueError(f"unknown divergence {divergence!r}")


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of each row; ids that `a` never takes add nothing."""
    a = log_a.exp()
    return (a * torch.where(a > 0, log_a - log_b, 0.0)).sum(-1)


def _log_mixture(log_a: Tensor, log_b: Tensor, share_of_a: float) -> Tensor:
    """log(share * a + (1 - share) * b). Minus infinity becomes a finite number, else its gradient is not a number."""
    if share_of_a == 0.0:
        return log_b
    floor = torch.finfo(log_a.dtype).min / 4
    log_a, log_b = log_a.clamp(min=floor), log_b.clamp(min=floor)
    return torch.logaddexp(log_a + math.log(share_of_a), log_b + math.log1p(-share_of_a))
