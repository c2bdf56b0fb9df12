"""What a new user gets wrong: one clear message that names the key or file and the mend, exit code 2, no traceback."""

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.runs import TINY_TEACHER, disaggkd, disaggkd_apart, metrics, write_config


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "run.yaml", run_dir=str(tmp_path / "run"))


def refused(*arguments: str, code: int = 2, **variables: str) -> str:
    """Run a command that must be refused, and return what it said."""
    got, output = disaggkd(*arguments, **variables)
    assert got == code, output
    assert "Traceback" not in output
    return output


AT_ONCE = {
    "an unknown key": (["train.stepz=3"], "train.stepz: there is no such key; did you mean train.steps?"),
    "a wrong type": (["train.steps=many"], "train.steps: is the text many, but must be a whole number"),
    "a word that is not known": (["mode=colocatd"], "mode: 'colocatd' is not known; did you mean colocated?"),
    "no ring": (["transport.ring_depth=0"], "transport.ring_depth: 0 is too small; it must be at least 1"),
    "no equals sign": (["train.steps", "3"], "'train.steps': an override is written key=value"),
    "a model that is not there": (["teacher.model=./smollm"], "teacher.model: ./smollm does not exist"),
    "a data file that is not there": (["data.train=./no.txt"], "data.train: ./no.txt does not exist"),
    "a builtin that is not there": (["data.train=builtin:bible"], "builtin:bible is not known; there is builtin:pydoc"),
    "two starting points": (["student.model=a/b"], "give only one of student.model, student.from_teacher"),
    "nothing to learn": (["loss.kd_weight=0"], "both it and loss.ce_weight are 0"),
    "ranks that do not divide": (["student.ranks=3", "student.replicate=2"], "2 does not divide student.ranks=3"),
    "a resolver": (["seed=${oc.env:HOME}"], "seed: '${oc.env:HOME}' calls a resolver"),
    "a checkpoint that is not there": (["--resume", "runs/none"], "--resume runs/none: is no checkpoint directory"),
    "a foreign address": (["launch.rendezvous=node1:1"], "launch.bind=loopback keeps listeners on this machine"),
    "a recording that is not there": (["teacher.cache=nowhere"], "teacher.cache: nowhere is no directory"),
    "a run directory that cannot be": (["run_dir=/proc/runs"], "run_dir: /proc/runs cannot be written to"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_at_once(config, name):
    arguments, message = AT_ONCE[name]
    assert message in refused("run", str(config), *arguments)


def test_a_config_that_is_not_there(config):
    assert f"did you mean {config}?" in refused("run", str(config.with_name("runn.yaml")))


def test_a_command_that_is_not_there(config):
    got, output = disaggkd("rum", str(config))
    assert got == 2
    assert "run" in output


def test_a_separate_job_without_a_meeting_point(config):
    assert "add launch.rendezvous=HOST:PORT" in refused("teacher", str(config))
    assert "add launch.rendezvous=HOST:PORT" in refused("student", str(config))


def test_a_run_directory_that_is_taken(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("{}")
    assert "; add --resume auto to go on with it" in refused("run", str(config))


def write(path, text: str):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty.txt"),
        ("broken.jsonl", '{"text": "fine"}\n{"text": \n', "broken.jsonl line 2: not JSON"),
        ("field.jsonl", '{"texts": "which?"}\n', "field.jsonl line 1: needs text"),
    ],
)
def test_texts_that_cannot_be_used(config, tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert message in refused("run", str(config), "mode=colocated", f"data.train={path}")


def test_a_model_directory_without_a_model(config, tmp_path):
    (tmp_path / "model").mkdir()
    output = refused("run", str(config), f"teacher.model={tmp_path}/model")
    assert "holds no config.json" in output or "found none that can be read" in output


def test_a_damaged_model(config, tmp_path):
    shutil.copytree(TINY_TEACHER, tmp_path / "model")
    os.truncate(tmp_path / "model" / "model.safetensors", 1000)
    assert "teacher.model" in refused("run", str(config), "mode=colocated", f"teacher.model={tmp_path}/model")


def test_vocabularies_that_differ(config, tmp_path):
    """Same size is not same vocabulary: two ids swapped are named."""
    shutil.copytree(TINY_TEACHER, tmp_path / "student")
    path = tmp_path / "student" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {index: token for token, index in vocabulary.items()}
    vocabulary[names[700]], vocabulary[names[701]] = 701, 700
    path.write_text(json.dumps(tokenizer))
    output = refused(
        "run", str(config), "mode=colocated", "student.from_teacher=null", f"student.model={tmp_path}/student"
    )
    assert "700" in output
    assert "701" in output


def test_layers_that_are_not_there(config):
    output = refused("run", str(config), "mode=colocated", "student.from_teacher.layers=[0, 9]")
    assert "9 is not there; the teacher has layers 0 to 3" in output


def test_a_pattern_that_freezes_nothing(config):
    output = refused("run", str(config), "mode=colocated", "student.freeze=['*embedding*']")
    assert "student.freeze: '*embedding*' matches no parameter; names look like" in output


def test_a_teacher_that_cannot_start_is_heard(config, tmp_path):
    """The teacher's own message reaches the terminal, though its output goes to a file."""
    shutil.copytree(TINY_TEACHER, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "model")
    arguments = ("student.from_teacher=null", f"student.model={TINY_TEACHER}", f"teacher.model={tmp_path}/model")
    output = refused("run", str(config), *arguments)
    assert "teacher 0 could not start" in output
    assert "up_proj.weight" in output


def test_a_gpu_that_is_not_there(config):
    import torch

    if torch.cuda.is_available():
        return
    output = refused("run", str(config), "mode=colocated", "launch.device=cuda")
    assert "launch.device: cuda is asked for, but torch sees no GPU here" in output


def test_print_config_prints_the_config_and_nothing_else(config):
    code, output, errors = disaggkd_apart("run", str(config), "train.steps=3", "--print-config")
    assert (code, errors) == (0, "")
    from disaggkd_cli.config import load

    again = config.with_name("again.yaml")
    again.write_text(output)
    assert load(again) == load(config, ["train.steps=3"])


def test_dry_run_starts_nothing(config, tmp_path):
    code, output = disaggkd("run", str(config), "--dry-run", "teacher.replicas=2", "student.ranks=2")
    assert code == 0
    assert "student 1" in output
    assert "teacher 1" in output
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_random_weights_is_a_warning_before_the_first_step(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY_TEACHER)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    model.save_pretrained(tmp_path / "random")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_TEACHER / file, tmp_path / "random" / file)
    config = write_config(
        tmp_path / "run.yaml", teacher__model=str(tmp_path / "random"), student={"model": str(TINY_TEACHER)},
        train__steps=1, train__warmup_steps=0, mode="colocated",
    )  # fmt: skip
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path / 'run'}")
    assert code == 0, output
    assert "warning: the teacher is no better than guessing: its loss on the held-out text is 7.6" in output
    first = metrics(tmp_path / "run")[0]
    assert first["eval_teacher_lm_loss"] > 7.3 > first["eval_lm_loss"]
    assert first["eval_top1_agreement"] < 0.1
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(tmp_path / "random")
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path / 'refused'}")
    assert code == 2, output
    assert "its embedding (2048, 128) holds nothing but zeros" in output
