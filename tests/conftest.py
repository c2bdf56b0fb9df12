"""What holds for every test: the environment that it leaves is the one that it found."""

import os

import pytest

_PYTEST_OWN = {"PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """Undo what code under test writes into `os.environ`, such as the interface that a rank settles on."""
    before = dict(os.environ)
    yield
    for name in (set(os.environ) | set(before)) - _PYTEST_OWN:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)
