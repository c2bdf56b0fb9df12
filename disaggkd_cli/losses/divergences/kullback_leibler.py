"""Forward KL, reverse KL, and their weighted sum. All follow from what the first pass over the logits sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disaggkd_cli.losses.divergences.entry import Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


def _reverse_gradient(q: Tensor, log_p: Tensor, log_q: Tensor, baseline: Tensor) -> Tensor:
    return (q * (log_q - log_p - baseline)).where(q > 0, 0.0)


def _sum_of_both(forward: Tensor, reverse: Tensor, beta: float) -> Tensor:
    # A weight of zero leaves its part out, also where that part is infinite.
    if beta in (0, 1):
        return forward if beta == 1 else reverse
    return beta * forward + (1 - beta) * reverse


FORWARD_KL = Divergence(
    name="forward_kl",
    of_rows=lambda log_p, log_q, beta: kl(log_p, log_q),
    gradient=lambda p, q, log_p, log_q, beta, baseline: q - p,
    full_logits_bytes=29.0,
    from_kl=lambda forward, reverse, beta: forward,
    needs_forward_kl=True,
)

REVERSE_KL = Divergence(
    name="reverse_kl",
    of_rows=lambda log_p, log_q, beta: kl(log_q, log_p),
    gradient=lambda p, q, log_p, log_q, beta, baseline: _reverse_gradient(q, log_p, log_q, baseline),
    full_logits_bytes=29.0,
    from_kl=lambda forward, reverse, beta: reverse,
    needs_reverse_kl=True,
)

SYMMETRIC_KL = Divergence(
    name="symmetric_kl",
    of_rows=lambda log_p, log_q, beta: _sum_of_both(kl(log_p, log_q), kl(log_q, log_p), beta),
    gradient=lambda p, q, log_p, log_q, beta, baseline: (
        beta * (q - p) + (1 - beta) * _reverse_gradient(q, log_p, log_q, baseline)
    ),
    full_logits_bytes=34.0,
    from_kl=_sum_of_both,
    needs_forward_kl=True,
    needs_reverse_kl=True,
    needs_beta=True,
)
