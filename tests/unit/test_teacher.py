"""A teacher merges requests only after it has seen that nothing changes by it."""

import logging

import pytest
import torch

from disaggkd_cli.config import Config
from disaggkd_cli.models import backbone_of
from disaggkd_cli.teacher import teacher_rows, verified_merge_tokens
from tests.support.models import VOCABULARY, tiny_model


@pytest.fixture
def config():
    made = Config()
    made.teacher.merge_tokens = 100_000
    made.data.sequence_length = 20
    made.train.micro_batch_sequences = 3
    made.student.ranks = 2
    return made


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("disaggkd"), "propagate", True)
    caplog.set_level(logging.INFO, "disaggkd")
    return caplog


def counted(forward):
    sizes = []

    def wrapped(request):
        sizes.append(tuple(request.input_ids.shape))
        return forward(request)

    return wrapped, sizes


def test_a_model_whose_rows_stand_alone_may_merge(config, log):
    backbone = backbone_of(tiny_model("llama"))
    forward, sizes = counted(lambda request: teacher_rows(backbone, request, torch.device("cpu")))
    assert verified_merge_tokens(config, forward, VOCABULARY) == 100_000
    assert "keep every bit" in log.text
    # A link has two send buffers, so at most four micro-batches of two students wait together.
    assert {(1, 20), (2, 20), (3, 20), (6, 20), (12, 20), (3, 12), (12, 12)} <= set(sizes)


@pytest.mark.parametrize("smallest", [3, 12])
def test_a_last_bit_that_depends_on_the_batch_turns_merging_off_aloud(config, log, smallest):
    backbone = backbone_of(tiny_model("llama"))

    def forward(request):
        states = teacher_rows(backbone, request, torch.device("cpu")).clone()
        if len(request.input_ids) >= smallest:
            states[0, 0] = torch.nextafter(states[0, 0], torch.tensor(9.0))
        return states

    assert verified_merge_tokens(config, forward, VOCABULARY) == 0
    assert "teacher.merge_tokens=100000 is off: a shared forward changes bits" in log.text


def test_too_little_memory_turns_merging_off_aloud(config, log):
    def forward(request):
        raise torch.OutOfMemoryError("no")

    assert verified_merge_tokens(config, forward, VOCABULARY) == 0
    assert "no memory for 3 sequences at once" in log.text


def test_nothing_is_tried_where_nothing_is_asked(config):
    config.teacher.merge_tokens = 0
    assert verified_merge_tokens(config, None, VOCABULARY) == 0
