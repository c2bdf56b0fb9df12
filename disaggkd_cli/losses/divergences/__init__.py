"""The divergences: one entry each, the only owner of a formula. Imports no torch."""

from __future__ import annotations

from disaggkd_cli.losses.divergences.entry import Divergence
from disaggkd_cli.losses.divergences.kullback_leibler import FORWARD_KL, REVERSE_KL, SYMMETRIC_KL
from disaggkd_cli.losses.divergences.mixtures import JSD, SKEWED_FORWARD_KL, SKEWED_REVERSE_KL
from disaggkd_cli.losses.divergences.total_variation import TOTAL_VARIATION

__all__ = ["DIVERGENCES", "Divergence", "divergence_named"]

_ENTRIES = (
    FORWARD_KL,
    REVERSE_KL,
    JSD,
    SKEWED_FORWARD_KL,
    SKEWED_REVERSE_KL,
    SYMMETRIC_KL,
    TOTAL_VARIATION,
)
_BY_NAME = {entry.name: entry for entry in _ENTRIES}

DIVERGENCES = tuple(_BY_NAME)
"""The names that there are."""


def divergence_named(name: str) -> Divergence:
    """Return the entry of a name of DIVERGENCES.

    Raises:
        KeyError: there is none; whoever takes names from a user checks them first.
    """
    return _BY_NAME[name]
