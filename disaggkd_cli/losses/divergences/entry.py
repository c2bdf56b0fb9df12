"""What there is to say about a divergence, in one entry. Imports no torch: config and planner read entries too.

`p` is the teacher and `q` the student, both softmax of logits over the temperature. For D = sum phi(p, q), the gradient
with respect to the student's tempered logits is `q * (a - E_q[a])` with `a = d phi / d q`: one number for each row (its
baseline) is all that a tile must know of the other tiles beside the two log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NEGLIGIBLE = 1e-30
"""A probability whose share in a mixture may underflow to zero in float32; its terms are too small to count."""


@dataclass(frozen=True)
class Divergence:
    """One divergence; its functions use methods of tensors only.

    Exactly one of `from_kl` and `terms` is given, and says where value and row baseline come from: from the KLs that
    the first pass over the logits sums anyway, or from a pass of their own.

    Attributes:
        name: what `loss.divergence` calls it.
        of_rows: `f(log_p, log_q, beta)` of log-probabilities [R, V]: the divergence of each row [R], the definition.
            Differentiable by autograd; log-probabilities of minus infinity (masked ids) are allowed.
        gradient: `f(p, q, log_p, log_q, beta, baseline)`: its gradient [R, V] with respect to the student's logits over
            the temperature. `baseline` [R, 1] is KL(q || p) where there is `from_kl`, else the second sum of `terms`.
        full_logits_bytes: peak bytes for each row and vocabulary entry of `loss.implementation: full` at temperature 1
            with float32 logits, traced with MemTracker.
        from_kl: `f(forward, reverse, beta)`: the divergence from KL(p || q) and KL(q || p).
        needs_forward_kl, needs_reverse_kl: which of them the first pass must sum.
        terms: `f(p, q, log_p, log_q, beta)`: elementwise terms [R, V], whose row sums are the divergence and the
            baseline.
        needs_beta: whether it has a mixing weight, between 0 and 1.
        zero_at: values of beta that make it zero everywhere, which are refused.
        instead: what to do then.
    """

    name: str
    of_rows: Callable[[Tensor, Tensor, float], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor], Tensor]
    full_logits_bytes: float
    from_kl: Callable[[Tensor, Tensor, float], Tensor] | None = None
    needs_forward_kl: bool = False
    needs_reverse_kl: bool = False
    terms: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    needs_beta: bool = False
    zero_at: tuple[float, ...] = ()
    instead: str = ""

    def passes(self, gradients: bool = True) -> int:
        """Return how often the loss passes over the logits: for statistics, for `terms`, and for gradients."""
        return 1 + (self.terms is not None) + gradients

    def wrong_beta(self, beta: float) -> str | None:
        """Return what is wrong with `beta`, or None."""
        if not self.needs_beta:
            return None
        if not 0 <= beta <= 1:
            return f"beta={beta!r} must lie between 0 and 1"
        if beta in self.zero_at:
            return f"beta={beta!r} makes {self.name} zero everywhere; {self.instead}"
        return None


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of each row; ids that `a` never takes add nothing."""
    a = log_a.exp()
    return (a * (log_a - log_b).where(a > 0, 0.0)).sum(-1)
