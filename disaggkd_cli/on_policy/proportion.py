"""Which sequences of the endless training stream the student writes: an exact share, spread evenly, without a coin."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class WrittenPlace:
    """One sequence of the stream that the student writes.

    Attributes:
        position: in the stream of training sequences, from 0.
        prompt: the position whose prompt it completes: its own, or where a prompt is completed several times that of
            the first of them.
        sample: which of the completions of that prompt, from 0.
    """

    position: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class Proportion:
    """`fraction` of the stream is written, `samples` completions a prompt.

    Position g is written where ⌊(g + 1) · fraction⌋ exceeds ⌊g · fraction⌋: of any run of n sequences as many as
    n · fraction, give or take one.
    """

    fraction: Fraction
    samples: int = 1

    @classmethod
    def of(cls, fraction: float, samples: int = 1) -> Proportion:
        """`fraction` as it was written in the config: 0.1 is a tenth."""
        return cls(Fraction(str(fraction)), samples)

    def before(self, position: int) -> int:
        """How many of the positions 0 … position - 1 are written."""
        return position * self.fraction.numerator // self.fraction.denominator

    def position(self, number: int) -> int:
        """The position of the written sequence with this number, from 0."""
        return -(-(number + 1) * self.fraction.denominator // self.fraction.numerator) - 1

    def written(self, start: int, stop: int) -> list[WrittenPlace]:
        """The written ones among positions start … stop - 1, in order."""
        if not self.fraction:
            return []
        found = []
        for number in range(self.before(start), self.before(stop)):
            group, sample = divmod(number, self.samples)
            found.append(WrittenPlace(self.position(number), self.position(group * self.samples), sample))
        return found
