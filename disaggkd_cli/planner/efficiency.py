"""What kernels achieve, by architecture and kind of work: fitted to half of the published rates (published_rates.csv)
by `scripts/fit_efficiencies.py`, and judged on the other half."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """Achieved shares of one architecture.

    Attributes:
        matmul: of the catalogue's largest measured matrix product rate, in matrix products of whole layers.
        attention: of the same, in fused causal softmax attention over long sequences.
        half_length: sequence length at which attention achieves half of that share.
        pointwise: bytes of memory traffic for each byte that a layer saves for backward, in each pass.
        fitted: whether published runs of this architecture gave the figures.
    """

    matmul: float
    attention: float
    half_length: float
    pointwise: float
    fitted: bool = True


@dataclass(frozen=True)
class Kernels:
    """Rates of all architectures, and what they have in common.

    Attributes:
        rates: by architecture.
        experts: share of `matmul` in grouped matrix products of routed experts.
        compiled: what `torch.compile` leaves of the pointwise traffic.
        exposed: share of the shorter of compute and collectives that is not hidden behind the longer.
        delta_net: share of the matrix rate in the chunks of a gated delta net (fla's kernels). Assumed: no published
            run tells it apart.
        float8: how much faster matrix products are in float8; only published rows run so.
    """

    rates: dict[str, Rates] = field(
        default_factory=lambda: {
            "ampere": Rates(matmul=1.0, attention=0.384, half_length=2548, pointwise=1.0),
            "hopper": Rates(matmul=0.954, attention=0.233, half_length=0, pointwise=3.66),
        }
    )
    experts: float = 0.324
    compiled: float = 0.294
    exposed: float = 1.0
    delta_net: float = 0.25
    float8: float = 1.36

    def of(self, architecture: str) -> Rates:
        """The rates of an architecture; those of Hopper, not fitted, for one without published runs."""
        if architecture in self.rates:
            return self.rates[architecture]
        hopper = self.rates["hopper"]
        return Rates(hopper.matmul, hopper.attention, hopper.half_length, hopper.pointwise, fitted=False)


KERNELS = Kernels()
"""`python scripts/fit_efficiencies.py` prints the fitted figures."""
