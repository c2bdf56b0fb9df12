"""Tests that need a GPU: each is marked `gpu`, and skipped with the reason where there is none.

With DISAGGKD_REHEARSE_GPU=cpu they run on the CPU instead, so that every line is tried before a GPU is to be had.
"""

from __future__ import annotations

import os

import pytest
import torch

REHEARSED = os.environ.get("DISAGGKD_REHEARSE_GPU") == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """The first GPU, or the CPU in a rehearsal."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not REHEARSED:
        pytest.skip("no CUDA device here")
    return torch.device("cpu")
