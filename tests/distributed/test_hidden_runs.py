"""Runs with a loss of the hidden states: the same wherever the teacher lives, resumed exactly, and not exported."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.support.runs import disaggkd, losses, metrics, run_to_end, status, weights_sha256, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 10


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("hidden") / "run.yaml"
    return write_config(
        path, loss={"hidden_weight": 0.5, "hidden_loss": "cosine"}, train__steps=STEPS, train__save_every=0,
        train__eval_every=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config):
    return run_to_end(config, config.parent / "run")


def values(directory, name):
    return [line[name] for line in metrics(directory) if name in line]


def test_it_is_logged_learnt_and_no_part_of_the_export(run):
    hidden = values(run, "hidden")
    assert len(hidden) == STEPS and hidden[-1] < hidden[0]
    assert len(values(run, "eval_hidden")) == 3
    for line in metrics(run):
        if "hidden" in line:
            assert line["loss"] == pytest.approx(line["kd"] + 0.5 * line["hidden"], rel=1e-5)
    with safe_open(run / "student" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "projection" in name]
    model, told = AutoModelForCausalLM.from_pretrained(run / "student", output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()
    manifest = json.loads((run / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    names = []
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            with safe_open(run / "checkpoints" / f"step_{STEPS:08d}" / name, "pt") as file:
                names += list(file.keys())
    assert "student.projection" in names and "optimizer.projection.exp_avg" in names


def test_a_teacher_on_the_same_ranks_gives_the_same_bits(config, run, tmp_path):
    together = run_to_end(config, tmp_path / "together", "mode=colocated")
    assert values(together, "hidden") == values(run, "hidden")
    assert weights_sha256(together) == weights_sha256(run)


@pytest.mark.parametrize("more", [(), ("loss.vocabulary_parallel=true",), ("mode=colocated",)])
def test_two_ranks_have_the_same_losses(config, run, tmp_path, more):
    two = run_to_end(config, tmp_path / "two", "student.ranks=2", "train.micro_batch_sequences=2", *more)
    assert losses(two) == pytest.approx(losses(run), rel=1e-5)
    assert values(two, "hidden") == pytest.approx(values(run, "hidden"), rel=1e-5)
    assert values(two, "eval_hidden") == pytest.approx(values(run, "eval_hidden"), rel=1e-5)


def test_five_steps_and_five_are_ten(config, run, tmp_path):
    directory = tmp_path / "stopped"
    code, output = disaggkd("run", str(config), f"run_dir={directory}", "train.stop_at=5")
    assert code == 75, output
    run_to_end(config, directory, "--resume", "auto")
    assert losses(directory) == losses(run) and values(directory, "hidden") == values(run, "hidden")
    assert weights_sha256(directory) == weights_sha256(run)


def test_a_run_that_began_without_it_goes_on_with_a_fresh_projection(config, tmp_path):
    directory = tmp_path / "later"
    without = ("loss.hidden_weight=0", "loss.hidden_loss=null")
    code, output = disaggkd("run", str(config), f"run_dir={directory}", "train.stop_at=5", *without)
    assert code == 75, output
    run_to_end(config, directory, "--resume", "auto")
    assert len(values(directory, "hidden")) == STEPS - 5 and len(losses(directory)) == STEPS
    assert any("loss.hidden_weight was 0" in line for line in status(directory)["changed"])
    back = tmp_path / "back"
    code, output = disaggkd("run", str(config), f"run_dir={back}", "train.stop_at=5")
    assert code == 75, output
    run_to_end(config, back, "--resume", "auto", *without)
    assert len(values(back, "hidden")) == 5 and len(losses(back)) == STEPS


def test_adapters_and_recorded_hidden_states(config, run, tmp_path):
    lora = run_to_end(config, tmp_path / "lora", "student.lora.rank=4", "student.lora.targets=[q_proj, v_proj]")
    assert values(lora, "hidden")[-1] < values(lora, "hidden")[0]
    recorded = tmp_path / "recorded"
    code, output = disaggkd("teacher", str(config), "--record", str(recorded))
    assert code == 0, output
    again = run_to_end(config, tmp_path / "again", f"teacher.cache={recorded}")
    assert weights_sha256(again) == weights_sha256(run)


def test_check_proves_it(config, tmp_path):
    for kind in ("cosine", "mse"):
        code, output = disaggkd("check", str(config), f"run_dir={tmp_path / kind}", f"loss.hidden_loss={kind}")
        assert code == 0, output
