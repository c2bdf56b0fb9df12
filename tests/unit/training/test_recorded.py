"""A recording stands in for the teacher of a run: same states, bit by bit, and refused where they are not there."""

import dataclasses
import itertools

import pytest
import torch

from disaggkd_cli.config import load
from disaggkd_cli.data import load_splits, load_tokenizer
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import backbone_of, load_causal_lm, requested_states, resolve_source
from disaggkd_cli.training import recorded
from disaggkd_cli.training.recorded import RecordedSource, open_recording, record_run
from disaggkd_cli.training.schedule import WorkPlan
from disaggkd_cli.training.sources import request_of
from tests.support.runs import TINY_TEACHER, write_config

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")
WIDTH = 128


@pytest.fixture
def config(tmp_path):
    changes = {"train__steps": 6, "train__eval_every": 2, "teacher__cache": str(tmp_path / "cache")}
    return load(write_config(tmp_path / "run.yaml", run_dir=str(tmp_path / "run"), **changes))


def record(config, lines=None):
    return record_run(config, config_directory(config), CPU, (lines if lines is not None else []).append)


def config_directory(config):
    from pathlib import Path

    return Path(config.teacher.cache)


def items_of(config, rank=0):
    splits = load_splits(config.data, load_tokenizer(TINY_TEACHER), pack=True, seed=config.seed)
    return WorkPlan(config, splits.train, splits.evaluation, rank, 0).items(0)


def changed(config, section, **values):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def test_replayed_states_are_the_live_teachers(config):
    lines = []
    record(config, lines)
    assert "0 of them recorded already" in lines[0]
    backbone = backbone_of(load_causal_lm(resolve_source(str(TINY_TEACHER)), torch.float32, "teacher.model"))
    source = RecordedSource(open_recording(config, WIDTH), items_of(config), CPU)
    taken = 0
    for item in items_of(config):
        request = request_of(item)
        live = requested_states(backbone, request.input_ids, request.document_lengths, request.rows, CPU)
        rows = source.take()
        assert rows.item.request_id == item.request_id
        assert torch.equal(rows.hidden, live)
        rows.release()
        taken += 1
    assert taken == 6 + 4 * 2, "six steps, and four evaluations of two micro-batches"


def test_one_evaluation_is_recorded_for_all_of_them(config):
    assert record(config) == 6 + 2


def test_an_interrupted_recording_asks_the_teacher_only_for_the_rest(config, monkeypatch):
    answer = recorded.requested_states
    calls = itertools.count()

    def dies(*arguments):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(recorded, "requested_states", dies)
    monkeypatch.setattr(recorded.Recorder, "__init__", with_small_shards(recorded.Recorder.__init__))
    with pytest.raises(KeyboardInterrupt):
        record(config)
    lines = []
    assert record(config, lines) == 8 - 5
    assert "8 requests, 5 of them recorded already" in lines[0]
    assert record(config) == 0


def with_small_shards(init):
    def small(self, directory, identity):
        init(self, directory, identity, shard_bytes=1)

    return small


def test_the_same_recording_serves_other_losses_and_ranks(config):
    record(config)
    other = changed(config, "loss", divergence="jsd", temperature=2.0)
    other = changed(changed(other, "train", learning_rate=1.0, accumulation=1), "student", ranks=1)
    source = RecordedSource(open_recording(other, WIDTH), items_of(other), CPU)
    assert source.take().item.request_id == 0


@pytest.mark.parametrize(("section", "values"), [("train", {"micro_batch_sequences": 2}), ("data", {"eval": 0.2})])
def test_micro_batches_that_were_not_recorded_are_refused(config, section, values):
    record(config)
    other = changed(config, section, **values)
    source = RecordedSource(open_recording(other, WIDTH), items_of(other), CPU)
    with pytest.raises(UserError, match="teacher.cache: .* holds no hidden states of request"):
        for _ in items_of(other):
            source.take()


def test_another_dtype_is_refused(config):
    record(config)
    with pytest.raises(UserError, match="dtype .float32 recorded, bfloat16 now"):
        open_recording(changed(config, "transport", dtype="bfloat16"), WIDTH)
    with pytest.raises(UserError, match="recordings hold no float8"):
        open_recording(changed(config, "transport", dtype="float8"), WIDTH)


def test_a_disk_that_is_too_small_is_said_before_anything_is_computed(config, monkeypatch):
    monkeypatch.setattr(recorded.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match="1000 B left"):
        record(config)
    assert not list(config_directory(config).glob("*.safetensors"))
