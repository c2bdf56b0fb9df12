"""One stage's side of loading a teacher: what the stages compare, and when layers move."""

import json
import logging

import pytest
import torch

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.replica.staged import load_staged_teacher
from disaggkd_cli.transport import Identity
from tests.support.models import VOCABULARY, tiny_model

CPU = torch.device("cpu")


class Beside:
    """The world as rank 0 of two sees it, the other rank played by this."""

    def __init__(self, seconds=(1.0, 1.0), **changes):
        self.name, self.names, self.rank, self.size = "teacher 0.0", ["teacher 0.0", "teacher 0.1"], 0, 2
        self.seconds, self.changes = seconds, changes

    def gather(self, text: str) -> list[str]:
        if text == "ready":
            return [text, text]
        mine = json.loads(text)
        if isinstance(mine, list):
            return [text, json.dumps(list(self.seconds))]
        theirs = {**mine, "layers": [mine["layers"][1], 4], "identity": Identity("teacher 0.1").encode().decode()}
        return [text, json.dumps({**theirs, **self.changes})]


@pytest.fixture
def config(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    made = Config()
    made.teacher.model, made.teacher.dtype, made.teacher.ranks_per_replica = str(tmp_path), "float32", 2
    made.train.micro_batch_sequences, made.data.sequence_length = 2, 16
    return made


def timed(monkeypatch, seconds):
    monkeypatch.setattr("disaggkd_cli.replica.staged.layer_seconds", lambda *_: list(seconds))


def test_the_stages_hold_each_layer_once(config, monkeypatch, caplog):
    timed(monkeypatch, (1.0, 1.01))
    teacher = load_staged_teacher(config, CPU, Beside(), Identity("teacher 0.0"))
    assert teacher.division == ((0, 2), (2, 4))
    assert [one.role for one in teacher.identities] == ["teacher 0.0", "teacher 0.1"]
    assert (teacher.vocabulary_size, teacher.hidden_size) == (VOCABULARY, 32)
    assert teacher.stage.first and not teacher.stage.last and len(teacher.stage.own_layers()) == 2


def test_layers_move_once_to_where_they_are_faster(config, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("disaggkd"), "propagate", True)
    caplog.set_level(logging.INFO, "disaggkd")
    timed(monkeypatch, (3.0, 1.0))
    teacher = load_staged_teacher(config, CPU, Beside(), Identity("teacher 0.0"))
    assert teacher.division == ((0, 1), (1, 4))
    assert len(teacher.stage.own_layers()) == 1
    assert "stages by parameters: layers 0-1 | 2-3 (slowest 4,000.0 ms)" in caplog.text
    assert "stages by measured time: layers 0 | 1-3 (slowest 3,000.0 ms)" in caplog.text
    assert "layers moved once: the slowest stage takes 25% less" in caplog.text


@pytest.mark.parametrize("name", ["weights and config.json", "version of transformers", "dtype between layers"])
def test_stages_of_different_teachers_are_refused(config, monkeypatch, name):
    timed(monkeypatch, (1.0, 1.0))
    with pytest.raises(UserError, match=f"differ in their {name}: teacher 0.0 has .*, teacher 0.1 has other; give all"):
        load_staged_teacher(config, CPU, Beside(**{name: "other"}), Identity("teacher 0.0"))


def test_a_layer_that_nobody_holds_is_noticed(config, monkeypatch):
    timed(monkeypatch, (1.0, 1.0))
    with pytest.raises(RunError, match=r"the stages hold layers \[0, 1, 3\], not each of 4 once"):
        load_staged_teacher(config, CPU, Beside(layers=[3, 4]), Identity("teacher 0.0"))
