"""Hostile configs: refused in a moment, with the key, the field, its value and the mend; sound ones pass."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from disaggkd_cli.model_files import read_model_config, verify_model_directory
from disaggkd_cli.planner.models.find import load_preset, preset_names, resolve_model
from tests.support.models import ALL_FAMILIES, tiny_model
from tests.support.runs import TINY_TEACHER, write_config

HOSTILE = {
    "a negative width": ({"hidden_size": -64}, "hidden_size is -64; it must be a whole number from 1 to 1,048,576"),
    "no width": ({"hidden_size": 0}, "hidden_size is 0; it must be"),
    "a width as text": ({"hidden_size": "64"}, 'hidden_size is "64"; it must be'),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
    "a null vocabulary": ({"vocab_size": None}, "vocab_size is null; it must be"),
    "half a layer": ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; it must be"),
    "true layers": ({"num_hidden_layers": True}, "num_hidden_layers is true; it must be"),
    "a list of widths": ({"hidden_size": [64, 64]}, "hidden_size is [64, 64]; it must be"),
    "a mapping of a width": ({"hidden_size": {"a": 1}}, 'hidden_size is {"a": 1}; it must be'),
    "endless layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be"),
    "more layers than weights": ({"num_hidden_layers": 4000}, "num_hidden_layers is 4,000, but the weights beside it"),
    "endless ids": ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be"),
    "more ids than weights": ({"vocab_size": 2**20}, "vocab_size is 1,048,576, but model.embed_tokens.weight"),
    "a wider model than its weights": ({"hidden_size": 8192}, "hidden_size is 8,192, but model.embed_tokens.weight"),
    "an infinite width": ({"intermediate_size": float("inf")}, "intermediate_size is inf; it must be"),
    "no number": ({"head_dim": float("nan")}, "head_dim is nan; it must be"),
    "a negative head": ({"head_dim": -8}, "head_dim is -8; it must be"),
    "heads that do not share": ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
    "negative experts": ({"num_experts": -1}, "num_experts is -1; it must be"),
    "more experts than there are": (
        {"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, and there are 2 experts",
    ),
    "digits": ({"max_position_embeddings": 10**400}, "max_position_embeddings is 1000000"),
    "a text part that is none": ({"text_config": 5}, "text_config is 5; it must be a mapping"),
    "a hostile text part": ({"text_config": {"hidden_size": -1}}, "text_config.hidden_size is -1; it must be"),
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny teacher whose config can be edited."""
    directory = tmp_path / "model"
    shutil.copytree(TINY_TEACHER, directory)
    return directory


def edit(directory, changes):
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_sizes_are_refused_by_run_check_and_plan(model, tmp_path, kind):
    changes, message = HOSTILE[kind]
    edit(model, changes)
    config = write_config(tmp_path / "run.yaml", teacher__model=str(model), run_dir=str(tmp_path / "run"))
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        load(config, running=True)
    assert f"teacher.model: {model}/config.json: {message}" in str(caught.value)
    with pytest.raises(UserError) as caught:
        resolve_model(str(model), "student.model")
    assert f"student.model: {model}/config.json: {message}" in str(caught.value)
    assert "take the config.json that belongs to" in str(caught.value)
    assert time.process_time() - started < 5


def test_nesting_and_other_files_are_refused(model):
    file = model / "config.json"
    sound = json.loads(file.read_text())
    deep = {"a": 1}
    for _ in range(100):
        deep = {"a": deep}
    for text, message in (
        (json.dumps(sound | {"x": deep}), "nested more than 64 deep"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        ("[1, 2]", "holds no mapping"),
        ("{", "cannot be read as JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=f"teacher.model: {file} .*{message}"):
            verify_model_directory(str(model), "teacher.model")
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_model_config(file, "k")
    with file.open("wb") as opened:
        opened.truncate(2**34)  # a hole on disk
    with pytest.raises(UserError, match="has 16.00 GiB, so it is no config.json"):
        read_model_config(file, "k")


def test_a_huge_tokenizer_is_refused_unread(model):
    with (model / "tokenizer.json").open("wb") as opened:
        opened.truncate(2**35)
    started = time.process_time()
    with pytest.raises(UserError, match=r"tokenizer.json has 32.00 GiB, and no tokenizer is that large"):
        verify_model_directory(str(model), "teacher.model")
    assert time.process_time() - started < 1  # of the processor, which reading it would take many of


def test_fresh_weights_must_fit_this_machine(model, tmp_path):
    edit(model, {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 1000})
    config = write_config(tmp_path / "run.yaml", student={"from_config": str(model / "config.json")})
    with pytest.raises(UserError, match=r"student.from_config: .* take at least 1.* in float32, and this machine has"):
        load(config, running=True)
    edit(model, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4})
    verify_model_directory(str(model), "student.from_config", drawn=True)


def test_damaged_weights_are_refused(model):
    weights = next(model.glob("*.safetensors"))
    whole = weights.read_bytes()
    for data, message in (
        (whole[:-1], "bytes, and its header describes"),
        (whole[:4], "is damaged"),
        (b"\xff" * 8 + whole[8:], "a header of"),
        (whole[:8] + b"x" * 50 + whole[58:], "is damaged"),
    ):
        weights.write_bytes(data)
        with pytest.raises(UserError, match=f"teacher.model: .*{message}"):
            verify_model_directory(str(model), "teacher.model")


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_sound_models_of_every_family_pass(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    verify_model_directory(str(tmp_path), "teacher.model")
    verify_model_directory(str(tmp_path), "student.from_config", drawn=True)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_passes(tmp_path, preset):
    (tmp_path / "config.json").write_text(json.dumps(load_preset(preset)["config"]))
    verify_model_directory(str(tmp_path), "teacher.model")


def test_hub_names_and_gguf_files_are_let_be(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    for source in ("organisation/model", str(tmp_path / "m.gguf"), str(tmp_path / "nothing")):
        verify_model_directory(source, "teacher.model")


def test_no_torch_is_imported():
    code = "import sys, disaggkd_cli.model_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
