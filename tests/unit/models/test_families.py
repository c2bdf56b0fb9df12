"""Every family that the documents name: as teacher and as student, on a tiny random model of its real class."""

import pytest

from tests.support.families import TOLERANCE, family_row
from tests.support.models import ALL_FAMILIES

pytestmark = pytest.mark.timeout(120)

HEADS = {
    "cohere": "scale 0.25", "cohere2": "scale 0.25", "falcon_h1": "scale 0.5", "gemma2": "soft cap 3",
    "granite": "scale 0.25", "granitemoe": "scale 0.25", "granitemoehybrid": "scale 0.25", "hyperclovax": "scale 0.5",
    "minicpm3": "scale 0.5", "nanochat": "soft cap 15", "phi": "bias", "phimoe": "bias",
}  # fmt: skip
"""What the heads do besides a matrix product; all others do nothing."""

NOT_PACKED = {"falcon_h1", "gpt_oss", "granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family(family):
    row = family_row(family)
    assert row.head == HEADS.get(family, "")
    assert row.packs == (family not in NOT_PACKED)
    assert row.leaks == (not row.packs), "what the kind of its layers says of packing is what it does"
    assert row.teacher
    assert row.cut == "layers 0 and 3"
    assert row.fused_error < TOLERANCE
    assert row.sharded_error < TOLERANCE
    assert row.exported


def test_nothing_is_verified_that_is_not_there():
    assert set(HEADS) | NOT_PACKED <= set(ALL_FAMILIES)
