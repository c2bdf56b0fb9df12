"""One undisturbed run that every other run is compared with."""

import pytest

from tests.support.runs import run_to_end, write_config


@pytest.fixture(scope="session")
def reference_config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("reference") / "run.yaml")


@pytest.fixture(scope="session")
def reference(reference_config):
    """Twenty steps of one student rank with the teacher in a process of its own."""
    return run_to_end(reference_config, reference_config.parent / "run", fresh=True)
