"""The divergences: names, definitions, and the pieces that the fused loss needs. The only owner of a formula.

`p` is the teacher and `q` the student, both softmax of logits over the temperature. For D = sum phi(p, q), the gradient with
respect to the student's tempered logits u is `q * (a - E_q[a])` with `a = d phi / d q`.
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


def row_divergence(divergence: str, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row [R], from log-probabilities [R, V] of teacher and student: the definition itself.

    Differentiable by autograd; log-probabilities of minus infinity (masked ids) are allowed.
    """
    if divergence == "forward_kl":
        return _kl(log_p, log_q)
    if divergence == "reverse_kl":
        return _kl(log_q, log_p)
    if divergence == "symmetric_kl":
        return beta * _kl(log_p, log_q) + (1 - beta) * _kl(log_q, log_p)
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


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of each row; ids that `a` never takes add nothing."""
    a = log_a.exp()
    return (a * torch.where(a > 0, log_a - log_b, 0.0)).sum(-1)


def _log_mixture(log_a: Tensor, log_b: Tensor, share_of_a: float) -> Tensor:
    """log(share * a + (1 - share) * b). Minus infinity is raised to the least number, else its gradient is not a number."""
    if share_of_a == 0.0:
        return log_b
    floor = torch.finfo(log_a.dtype).min / 4
    log_a, log_b = log_a.clamp(min=floor), log_b.clamp(min=floor)
    return torch.logaddexp(log_a + math.log(share_of_a), log_b + math.log1p(-share_of_a))
