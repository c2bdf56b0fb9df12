"""Every shipped config loads."""

from pathlib import Path

import pytest

from disaggkd_cli.config import load

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_loads(path):
    config = load(path)
    assert config.teacher.model
    assert config.student.model or config.student.from_teacher or config.student.from_config
