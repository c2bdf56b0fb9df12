"""Which way of sharing a teacher `teacher.parallelism: auto` comes to."""

import logging

import pytest
import torch

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.replica import settle_layout
from tests.support.models import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("disaggkd"), "propagate", True)
    caplog.set_level(logging.INFO, "disaggkd")
    return caplog


def config_of(directory, ranks: int = 2, parallelism: str = "auto") -> Config:
    config = Config()
    config.teacher.model, config.teacher.ranks_per_replica = str(directory), ranks
    config.teacher.parallelism, config.teacher.dtype = parallelism, "float32"
    return config


def test_a_pipeline_where_it_is_proved(tmp_path, log):
    tiny_model("gemma2").save_pretrained(tmp_path)
    config = config_of(tmp_path)
    assert settle_layout(config, CPU) == config.teacher.parallelism == "pipeline"
    assert "teacher.parallelism=auto: pipeline, since a pipeline gives one rank's bits and gathers nothing" in log.text


def test_fsdp_where_the_proof_fails(tmp_path, log, monkeypatch):
    def refuse(*_):
        raise UserError("its layers hand on two tensors")

    monkeypatch.setattr("disaggkd_cli.replica.layout.prove_stages", refuse)
    tiny_model("llama").save_pretrained(tmp_path)
    assert settle_layout(config_of(tmp_path), CPU) == "fsdp"
    assert "auto: fsdp, since no pipeline: its layers hand on two tensors" in log.text


def test_fsdp_where_there_are_fewer_layers_than_ranks(tmp_path, log):
    tiny_model("llama").save_pretrained(tmp_path)
    assert settle_layout(config_of(tmp_path, ranks=5), CPU) == "fsdp"
    assert "5 stages, but" in log.text


@pytest.mark.parametrize("parallelism", ["pipeline", "fsdp", "tensor"])
def test_what_is_asked_for_stays(tmp_path, parallelism):
    assert settle_layout(config_of(tmp_path / "not looked at", parallelism=parallelism), CPU) == parallelism
