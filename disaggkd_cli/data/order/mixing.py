"""Several sources in given proportions: which source each position of the training stream is taken from.

The proportions hold for sequences. Weights are brought to whole numbers without a common divisor; each round of as many
positions as they sum to takes exactly that many sequences of each source, spread as evenly as can be: every position
goes to the source that is furthest behind its share (the smallest index, if several are). So over any whole number of
rounds the proportions are exact, nothing is drawn at random, and where each source stands at a position is known
without walking there. A source that ends begins its next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

import numpy as np

from disaggkd_cli.errors import UserError

LONGEST_ROUND = 100_000


def whole_weights(weights: list[float]) -> tuple[int, ...]:
    """The weights as whole numbers without a common divisor.

    Raises:
        UserError: a weight is not positive, or their proportions need a round longer than LONGEST_ROUND.
    """
    if any(isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight > 0 for weight in weights):
        raise UserError(f"data.train: weights must be numbers above 0, not {weights}")
    if any(weight in (float("inf"),) for weight in weights):
        raise UserError(f"data.train: weights must be finite, not {weights}")
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    divisor = reduce(gcd, whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > LONGEST_ROUND:
        raise UserError(
            f"data.train: the proportions of {weights} are only reached every {sum(whole):,} sequences; round them, "
            "for instance to 3 and 1"
        )
    return tuple(whole)


@dataclass(frozen=True)
class Mixture:
    """Where each position of a mixed stream comes from."""

    weights: tuple[int, ...]
    """[K] sequences of each source in a round."""
    pattern: np.ndarray
    """[W] int64: the source of each position of a round."""
    before: np.ndarray
    """[W, K] int64: sequences of each source in the round before each position."""

    @staticmethod
    def of(weights: tuple[int, ...]) -> Mixture:
        """The mixture of whole `weights`."""
        size = sum(weights)
        pattern, before = np.empty(size, np.int64), np.zeros((size, len(weights)), np.int64)
        taken, share = np.zeros(len(weights), np.int64), np.asarray(weights, np.int64)
        for position in range(size):
            before[position] = taken
            # In whole numbers: share · (position + 1) / size - taken, times size.
            behind = share * (position + 1) - taken * size
            behind[taken >= share] = np.iinfo(np.int64).min
            pattern[position] = int(np.argmax(behind))
            taken[pattern[position]] += 1
        return Mixture(weights, pattern, before)

    def sources(self, start: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """([number] source, [number] position in that source's own stream) of positions start, start + 1, …"""
        rounds, within = np.divmod(np.arange(start, start + number), len(self.pattern))
        source = self.pattern[within]
        return source, rounds * np.asarray(self.weights)[source] + self.before[within, source]
