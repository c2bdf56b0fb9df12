"""What the ring loses to jitter, in closed form."""

from __future__ import annotations

import math


def ring_loss(jitter: float, slots: float, slack: float) -> float:
    """Share of the throughput lost to jitter, with `slots` batches of buffer and a partner that is `slack` faster.

    From two slots on, the heavy-traffic form of a bounded queue between two stages of variation `jitter`, its
    constant fitted to simulations (without slack: `1.2 jitter^2 / slots`). With one, each batch takes the longer of
    the two stages' times. Tested against `simulate.py`."""
    if jitter <= 0:
        return 0.0
    if slots >= 2:
        return _queue_loss(jitter, slots, slack)
    one, two = _pair_loss(jitter, slack), _queue_loss(jitter, 2, slack)
    return one + (two - one) * max(slots - 1, 0.0)


def _queue_loss(jitter: float, slots: float, slack: float) -> float:
    variance = 1.2 * jitter**2
    exponent = max(slack, 0.0) * slots / variance
    if exponent < 1e-6:
        return min(variance / slots, 0.5)
    return 0.0 if exponent > 50 else min(slack / math.expm1(exponent), variance / slots, 0.5)


def _pair_loss(jitter: float, slack: float) -> float:
    """1 - 1 / E[max(X, Y)] for two normal times with means 1 and 1 / (1 + slack)."""
    gap = 1 - 1 / (1 + max(slack, 0.0))
    spread = jitter * math.sqrt(2)
    density = math.exp(-((gap / spread) ** 2) / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(gap / spread / math.sqrt(2))) / 2
    return 1 - 1 / (below + (1 - gap) * (1 - below) + spread * density)
