"""Configs to check, made from the tiny trained teacher and from tiny random models with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from disaggkd_cli.config import Config, load
from tests.support.models import tiny_model
from tests.support.runs import TINY_TEACHER, write_config


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config_of(tmp_path):
    """Return a maker of checked configs; `teacher__model=...` and the like change the tiny one."""

    def make(**changes) -> Config:
        path = write_config(tmp_path / "run.yaml", run_dir=str(tmp_path / "run"), **changes)
        return load(path, running=True)

    return make


@pytest.fixture
def model_directory(tmp_path):
    """Return a maker of model directories: a tiny random model of a family with the tiny teacher's tokenizer."""

    def make(family: str, name: str = "model", **changes) -> Path:
        directory = tmp_path / name
        tiny_model(family, vocab_size=2048, **changes).save_pretrained(directory)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY_TEACHER / file, directory / file)
        return directory

    return make
