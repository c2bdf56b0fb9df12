"""Ten minutes of faults at random, all kinds of them: the same weights, nothing left, nothing that grows."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from run_soak import is_clean, soak  # noqa: E402

SECONDS = 600


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_a_run_that_is_disturbed_all_the_time():
    figures = soak(SECONDS, seed=7)
    assert is_clean(figures), json.dumps(figures, indent=2)
    assert sum(figures["faults"].values()) >= 15
