"""A fresh seed for each run, printed so that a failure can be repeated with DISAGGKD_TEST_SEED."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def seed() -> int:
    """A seed, printed with the output of a failing test."""
    value = int(os.environ.get("DISAGGKD_TEST_SEED") or random.randrange(2**31))
    print(f"DISAGGKD_TEST_SEED={value}")
    return value
