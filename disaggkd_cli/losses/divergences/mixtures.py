"""Divergences from a mixture of teacher and student.

A term of a divergence of `a` from `m` is written `a log(a / m) - a + m`: the same sum, but no term is negative and
errors of the normalisers cancel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from disaggkd_cli.losses.divergences.entry import NEGLIGIBLE, Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


def _log_mixture(log_a: Tensor, log_b: Tensor, share_of_a: float) -> Tensor:
    """log(share * a + (1 - share) * b). Minus infinity becomes a finite number, else its gradient is not a number."""
    import torch  # here, because only the definitions need it

    if share_of_a == 0.0:
        return log_b
    floor = torch.finfo(log_a.dtype).min / 4
    log_a, log_b = log_a.clamp(min=floor), log_b.clamp(min=floor)
    return (log_a + math.log(share_of_a)).logaddexp(log_b + math.log1p(-share_of_a))


def _jsd_of_rows(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = _log_mixture(log_p, log_q, beta)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def _jsd_terms(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    m = beta * p + (1 - beta) * q
    log_m = m.log()
    of_q = (q * (log_q - log_m)).where(q > NEGLIGIBLE, 0.0) - q + m
    of_p = (p * (log_p - log_m)).where(p > NEGLIGIBLE, 0.0) - p + m
    return beta * of_p + (1 - beta) * of_q, of_q


def _jsd_gradient(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float, baseline: Tensor) -> Tensor:
    log_m = (beta * p + (1 - beta) * q).log()
    return (1 - beta) * (q * (log_q - log_m - baseline)).where(q > NEGLIGIBLE, 0.0)


def _skewed_forward_terms(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    m = beta * p + (1 - beta) * q
    of_p = (p * (log_p - m.log())).where(p > NEGLIGIBLE, 0.0) - p + m
    return of_p, (q * p / m).where(m > 0, 0.0)


def _skewed_forward_gradient(
    p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float, baseline: Tensor
) -> Tensor:
    m = beta * p + (1 - beta) * q
    return (1 - beta) * q * (baseline - (p / m).where(m > 0, 0.0))


def _skewed_reverse_terms(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    m = beta * q + (1 - beta) * p
    log_ratio = log_q - m.log()
    of_q = (q * log_ratio).where(q > NEGLIGIBLE, 0.0) - q + m
    return of_q, (q * (log_ratio - beta * q / m)).where(q > NEGLIGIBLE, 0.0)


def _skewed_reverse_gradient(
    p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, beta: float, baseline: Tensor
) -> Tensor:
    m = beta * q + (1 - beta) * p
    return (q * (log_q - m.log() - beta * q / m - baseline)).where(q > NEGLIGIBLE, 0.0)


JSD = Divergence(
    name="jsd",
    of_rows=_jsd_of_rows,
    gradient=_jsd_gradient,
    full_logits_bytes=46.0,
    terms=_jsd_terms,
    needs_beta=True,
    zero_at=(0, 1),
    instead="for a pure KL choose forward_kl or reverse_kl",
)

SKEWED_FORWARD_KL = Divergence(
    name="skewed_forward_kl",
    of_rows=lambda log_p, log_q, beta: kl(log_p, _log_mixture(log_p, log_q, beta)),
    gradient=_skewed_forward_gradient,
    full_logits_bytes=41.0,
    terms=_skewed_forward_terms,
    needs_beta=True,
    zero_at=(1,),
    instead="it must be below 1",
)

SKEWED_REVERSE_KL = Divergence(
    name="skewed_reverse_kl",
    of_rows=lambda log_p, log_q, beta: kl(log_q, _log_mixture(log_q, log_p, beta)),
    gradient=_skewed_reverse_gradient,
    full_logits_bytes=41.0,
    terms=_skewed_reverse_terms,
    needs_beta=True,
    zero_at=(1,),
    instead="it must be below 1",
)
