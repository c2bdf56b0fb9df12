"""Total variation: half the sum of the differences of the probabilities."""

from __future__ import annotations

from disaggkd_cli.losses.divergences.entry import Divergence

TOTAL_VARIATION = Divergence(
    name="total_variation",
    of_rows=lambda log_p, log_q, beta: 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1),
    gradient=lambda p, q, log_p, log_q, beta, baseline: 0.5 * q * ((q - p).sign() - baseline),
    full_logits_bytes=28.0,
    terms=lambda p, q, log_p, log_q, beta: (0.5 * (p - q).abs(), q * (q - p).sign()),
)
