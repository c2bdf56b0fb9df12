"""One stage's side of loading a teacher: what the stages compare, and when layers move."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.replica.staged import load_staged_teacher
from disaggkd_cli.transport import Identity
from tests.support.models import VOCABULARY, tiny_model

CPU = torch.device("cpu")


class Beside:
    """The world as rank 0 of two sees it, the other rank played by this."""

    def __init__(self, seconds=(1.0, 1.0), room=(math.inf, math.inf), **changes):
        self.room = room
        self.name, self.names, self.rank, self.size = "teacher 0.0", ["teacher 0.0", "teacher 0.1"], 0, 2
        self.seconds, self.changes = seconds, changes

    def gather(self, text: str) -> list[str]:
        if text == "ready":
            return [text, text]
        if text == str(math.inf):  # this rank's CPU has no bound
            return [str(free) for free in self.room]
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


def sizes(config):
    """Bytes of a layer, and of the embedding."""
    model = AutoModelForCausalLM.from_pretrained(config.teacher.model, dtype=torch.float32)
    return sum(p.nbytes for p in model.model.layers[0].parameters()), model.model.embed_tokens.weight.nbytes


def test_layers_are_dealt_out_by_bytes_where_only_that_fits(config, monkeypatch):
    """An embedding larger than all layers leaves its stage room for one of them."""
    tiny_model("llama", vocab_size=4000).save_pretrained(config.teacher.model)
    layer, embedding = sizes(config)
    assert embedding > 4 * layer
    timed(monkeypatch, (1.0,))
    there = Beside(seconds=(1.0, 1.0, 1.0), room=(1.5 * layer + embedding, 10 * layer))
    teacher = load_staged_teacher(config, CPU, there, Identity("teacher 0.0"))
    assert teacher.division == ((0, 1), (1, 4))


def test_layers_that_would_not_fit_elsewhere_stay(config, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("disaggkd"), "propagate", True)
    caplog.set_level(logging.INFO, "disaggkd")
    layer, embedding = sizes(config)
    timed(monkeypatch, (3.0, 1.0))  # the first stage would keep one layer of four
    room = (2 * layer + embedding, 2.5 * layer)
    teacher = load_staged_teacher(config, CPU, Beside(room=room), Identity("teacher 0.0"))
    assert teacher.division == ((0, 2), (2, 4))
    assert "layers stay where they are: the fullest stage would not fit" in caplog.text


def test_a_teacher_that_fits_in_no_division_is_refused(config):
    layer, _ = sizes(config)
    with pytest.raises(UserError, match=r"ranks_per_replica: stage . of 2 has .* free, and its weights need .* more"):
        load_staged_teacher(config, CPU, Beside(room=(layer, layer)), Identity("teacher 0.0"))


@pytest.mark.parametrize("name", ["weights and config.json", "version of transformers", "dtype between layers"])
def test_stages_of_different_teachers_are_refused(config, monkeypatch, name):
    timed(monkeypatch, (1.0, 1.0))
    with pytest.raises(UserError, match=f"differ in their {name}: teacher 0.0 has .*, teacher 0.1 has other; give all"):
        load_staged_teacher(config, CPU, Beside(**{name: "other"}), Identity("teacher 0.0"))


def test_a_layer_that_nobody_holds_is_noticed(config, monkeypatch):
    timed(monkeypatch, (1.0, 1.0))
    with pytest.raises(RunError, match=r"the stages hold layers \[0, 1, 3\], not each of 4 once"):
        load_staged_teacher(config, CPU, Beside(layers=[3, 4]), Identity("teacher 0.0"))
