"""What a run leaves, how it resumes, and properties that a right loss must have."""

import json
import platform
import shutil
import socket
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.runs import (
    TINY_TEACHER,
    descendants,
    disaggkd,
    losses,
    metrics,
    run_to_end,
    status,
    weights_sha256,
    write_config,
)


def stopped_run(config, run_dir, stops):
    """Run to the end with interruptions after the given steps."""
    resume = ["--resume", "never"]
    for stop in stops:
        code, output = disaggkd("run", str(config), f"run_dir={run_dir}", f"train.stop_at={stop}", *resume)
        assert code == 75, output
        assert status(run_dir)["state"] == "stopped"
        assert status(run_dir)["resumable"] is True
        resume = ["--resume", "auto"]
    return run_to_end(config, run_dir, *resume)


@pytest.mark.parametrize("stops", [pytest.param([10], marks=pytest.mark.slow), [6, 12]])
def test_interrupted_runs_end_in_the_same_weights(reference_config, reference, tmp_path, stops):
    run = stopped_run(reference_config, tmp_path / "pieces", stops)
    assert weights_sha256(run) == weights_sha256(reference)
    assert losses(run) == losses(reference)
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(reference)]


def test_fewer_steps_than_are_done_already(reference_config, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "run")
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={tmp_path}/run", "train.steps=5", "--resume", "auto", "mode=colocated"
    )
    assert code == 2
    assert "train.steps: is 5, but" in output
    assert "is from after step 20" in output
    assert "warning: train.steps was 20 and is 5 now: training goes on with the new value" in output
    assert [line.split()[0] for line in status(tmp_path / "run")["changed"]] == ["mode", "train.steps"]


@pytest.mark.slow
def test_a_student_killed_after_its_last_step_needs_no_teacher_to_end(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "student")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, output = disaggkd(
        "student", str(reference_config), f"run_dir={run}", f"launch.rendezvous=127.0.0.1:{port}",
        "transport.teacher_wait=3", "--resume", "auto",
    )  # fmt: skip
    assert code == 0, output
    assert weights_sha256(run) == weights_sha256(reference)
    assert status(run)["state"] == "finished"


def test_what_a_run_leaves(reference):
    expected = {"config.yaml", "environment.json", "status.json", "metrics.jsonl", "logs", "checkpoints", "student"}
    assert expected <= {path.name for path in reference.iterdir()}
    left = status(reference)
    assert left.pop("process") > 0 and left.pop("host") == platform.node()
    assert 0 <= time.time() - left.pop("written") < 3600
    assert left == {
        "state": "finished", "exit_code": 0, "reason": "all steps done", "last_step": 20, "resumable": False,
        "teacher_stages": [], "changed": [], "other_bits": [],
    }  # fmt: skip
    training = [line for line in metrics(reference) if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 21))
    wanted = (
        "step loss kd ce top1_agreement learning_rate grad_norm supervised_tokens tokens_per_second stall_seconds "
        "ring_fill received_bytes peak_memory_bytes"
    ).split()
    assert all(set(wanted) <= set(line) for line in training)
    evaluations = [line for line in metrics(reference) if "eval_kd" in line]
    assert [line["step"] for line in evaluations] == [0, 8, 16, 20]
    assert set(evaluations[0]) == {
        "step", "eval_lm_loss", "eval_perplexity", "eval_kd", "eval_top1_agreement", "eval_teacher_lm_loss",
        "eval_teacher_perplexity", "eval_received_bytes",
    }  # fmt: skip
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == ["step_00000014", "step_00000020"]
    environment = json.loads((reference / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert descendants(str(reference)) == []


def test_the_export_is_the_trained_student(reference_config, reference):
    """The exported model, loaded by transformers, has the LM loss that the last evaluation reported."""
    model = AutoModelForCausalLM.from_pretrained(reference / "student")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert json.loads((reference / "student" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    from disaggkd_cli.config import load
    from disaggkd_cli.data import load_splits, load_tokenizer

    data = load(reference_config).data
    held_out = load_splits(data, load_tokenizer(TINY_TEACHER), pack=True, seed=42).evaluation
    total, rows = 0.0, 0
    for number in range(8):
        sequence = held_out.sequence(number)
        assert len(sequence.document_lengths) == 1
        with torch.inference_mode():
            logits = model(torch.from_numpy(sequence.input_ids).long()[None]).logits[0]
        labels = torch.from_numpy(sequence.labels).long()
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        rows += int((labels != -100).sum())
    evaluations = [line for line in metrics(reference) if "eval_kd" in line]
    assert total / rows == pytest.approx(evaluations[-1]["eval_lm_loss"], rel=1e-5)


def test_the_same_student_as_teacher_has_nothing_to_learn_and_evaluation_is_not_training(tmp_path):
    """Nothing to learn at step 0; and at learning rate 0 every evaluation gives the same figures."""
    config = write_config(
        tmp_path / "run.yaml", student={"model": str(TINY_TEACHER)}, train__steps=2, train__eval_every=1,
        train__learning_rate=0.0,
    )  # fmt: skip
    run = run_to_end(config, tmp_path / "run")
    evaluations = [{**line, "step": 0} for line in metrics(run) if "eval_kd" in line]
    assert evaluations[0]["eval_kd"] == pytest.approx(0, abs=1e-6)
    assert evaluations[0]["eval_top1_agreement"] == 1.0
    assert losses(run)[0] == pytest.approx(0, abs=1e-6)
    assert metrics(run)[1]["grad_norm"] < 1e-4
    assert evaluations[0] == evaluations[1] == evaluations[2]


def test_the_teacher_matters_and_frozen_parts_stay(reference_config, reference, tmp_path):
    """Cross-entropy alone starts from the same weights as distillation, and goes elsewhere."""
    frozen = "student.freeze=['*embed_tokens*', '*layers.0.*']"
    control = run_to_end(
        reference_config, tmp_path / "control", "loss.kd_weight=0", "loss.ce_weight=1", "train.steps=2", frozen
    )
    assert metrics(reference)[0]["eval_lm_loss"] == metrics(control)[0]["eval_lm_loss"]
    first = [next(line for line in metrics(run) if "loss" in line) for run in (reference, control)]
    assert first[0]["loss"] == pytest.approx(first[0]["kd"])
    assert first[1]["loss"] == pytest.approx(first[1]["ce"])
    assert first[0]["kd"] == pytest.approx(first[1]["kd"])
    assert first[0]["grad_norm"] != first[1]["grad_norm"]
    trained = AutoModelForCausalLM.from_pretrained(control / "student").state_dict()
    teacher = AutoModelForCausalLM.from_pretrained(TINY_TEACHER, dtype=torch.float32).state_dict()
    assert torch.equal(trained["model.embed_tokens.weight"], teacher["model.embed_tokens.weight"])
    for name in trained:
        if ".layers.0." in name:
            assert torch.equal(trained[name], teacher[name]), name
    assert not torch.equal(trained["model.layers.1.mlp.up_proj.weight"], teacher["model.layers.2.mlp.up_proj.weight"])


@pytest.mark.slow
def test_low_precision_over_two_ranks_with_checkpointed_activations(reference_config, reference, tmp_path):
    run = run_to_end(
        reference_config, tmp_path / "low", "student.dtype=bfloat16", "teacher.dtype=bfloat16", "train.steps=5",
        "transport.dtype=bfloat16", "student.activation_checkpointing=full", "student.ranks=2",
        "train.micro_batch_sequences=2",
    )  # fmt: skip
    assert losses(run) == pytest.approx(losses(reference)[:5], rel=0.02)


@pytest.mark.slow
def test_checkpointed_activations_change_nothing(reference_config, reference, tmp_path):
    run = run_to_end(
        reference_config, tmp_path / "run", "mode=colocated", "student.activation_checkpointing=full", "train.steps=5"
    )
    assert losses(run) == pytest.approx(losses(reference)[:5], rel=1e-6)
