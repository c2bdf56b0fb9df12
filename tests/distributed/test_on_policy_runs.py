"""Runs in which the student writes: nothing of what other runs promise is lost."""

import json

import pytest

from tests.support.runs import disaggkd, losses, metrics, run_to_end, weights_sha256, write_config

SHORT = ("train.steps=10", "train.save_every=5", "train.eval_every=0", "loss.ce_weight=0.3")
WRITES = ("on_policy.fraction=0.5", "on_policy.max_new_tokens=16", "on_policy.prompt_tokens=8")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("on_policy") / "run.yaml")


@pytest.fixture(scope="module")
def undisturbed(config):
    return run_to_end(config, config.parent / "run", *SHORT, *WRITES)


def test_the_metrics_say_what_was_written(undisturbed):
    for line in [line for line in metrics(undisturbed) if "loss" in line]:
        assert 1 <= line["completion_tokens_mean"] <= 16 and 0 <= line["completion_cut_share"] <= 1
        assert line["sampled_entropy"] > 0 and line["on_policy_kd"] > 0 and line["data_kd"] > 0
        assert min(line["data_kd"], line["on_policy_kd"]) <= line["kd"] <= max(line["data_kd"], line["on_policy_kd"])


def test_evaluations_judge_the_students_own_continuations(undisturbed):
    lines = [line for line in metrics(undisturbed) if "eval_kd" in line]
    assert [line["step"] for line in lines] == [0, 10]
    for line in lines:
        assert line["eval_on_policy_kd"] > 0 and 1 <= line["eval_completion_tokens_mean"] <= 16


def test_five_steps_and_five_are_ten(config, undisturbed, tmp_path):
    run = tmp_path / "run"
    code, output = disaggkd("run", str(config), f"run_dir={run}", *SHORT, *WRITES, "train.stop_at=5")
    assert code == 75, output
    carried = json.loads((run / "checkpoints" / "step_00000005" / "completions.json").read_text())
    assert [row[0] for row in carried["completions"]] == [21, 23]  # the window of step 5, written while 4 was due
    run_to_end(config, run, *SHORT, *WRITES, "--resume", "auto")
    assert weights_sha256(run) == weights_sha256(undisturbed)
    assert losses(run) == losses(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["teacher 0.payload:kill@9", "student 0.after_writing:kill@8"])
def test_a_death_changes_no_bit(config, undisturbed, tmp_path, fault):
    code, output = disaggkd(
        "run", str(config), f"run_dir={tmp_path / 'run'}", "--restarts", "30", *SHORT, *WRITES,
        "train.save_every=2", DISAGGKD_TESTING="1", DISAGGKD_FAULT=f"student 0.before_commit:sleep:0.1,{fault}",
        timeout=280,
    )  # fmt: skip
    assert code == 0, output
    assert "was killed by SIGKILL" in output
    assert weights_sha256(tmp_path / "run") == weights_sha256(undisturbed)


@pytest.mark.slow
def test_two_student_ranks_write_the_same(config, undisturbed, tmp_path):
    arguments = ("student.ranks=2", "train.micro_batch_sequences=2")
    run = run_to_end(config, tmp_path / "run", *SHORT, *WRITES, *arguments)
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-4)


def test_a_share_of_nothing_is_a_run_without(config, tmp_path):
    short = ("train.steps=3", "train.eval_every=0")
    idle = run_to_end(config, tmp_path / "idle", *short, "on_policy.fraction=0.0")
    without = run_to_end(config, tmp_path / "without", *short)
    assert weights_sha256(idle) == weights_sha256(without)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(config, tmp_path):
    arguments = ("student.from_teacher.layers=[0,1,2,3]", "mode=colocated", "train.steps=2", "train.eval_every=0")
    run = run_to_end(
        config, tmp_path / "run", *arguments, "on_policy.fraction=1.0", *WRITES[1:], "train.learning_rate=0.0"
    )
    assert losses(run) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert metrics(run)[0]["eval_on_policy_kd"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_an_exact_share_is_written_with_accumulation_and_long_windows(config, tmp_path, fraction):
    arguments = (
        f"on_policy.fraction={fraction}", *WRITES[1:], "on_policy.every=4", "train.accumulation=2", *SHORT,
    )  # fmt: skip
    whole = run_to_end(config, tmp_path / "whole", *arguments)
    run = tmp_path / "run"
    assert disaggkd("run", str(config), f"run_dir={run}", *arguments, "train.stop_at=4")[0] == 75
    carried = json.loads((run / "checkpoints" / "step_00000004" / "completions.json").read_text())["completions"]
    between = int(1 / fraction)
    assert [row[0] for row in carried] == list(range(32 + between - 1, 64, between))  # steps 4 … 7, of 8 sequences each
    run_to_end(config, run, *arguments, "--resume", "auto")
    assert weights_sha256(run) == weights_sha256(whole)


@pytest.mark.slow
def test_prompts_alone_are_enough_where_the_student_writes_everything(tmp_path):
    asked, held = tmp_path / "asked.jsonl", tmp_path / "held.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"It was the {word}"}) + "\n" for word in ["house", "man"] * 10))
    held.write_text(json.dumps({"prompt": "She was", "completion": " very kind to her sister."}) + "\n")
    config = write_config(tmp_path / "run.yaml", data__train=str(asked), data__eval=str(held))
    arguments = ("on_policy.fraction=1.0", *WRITES[1:], "train.steps=3", "train.eval_every=0", "log.samples=2")
    lines = metrics(run_to_end(config, tmp_path / "run", *arguments))
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    drawn = [one for one in shown if one["table"] == "on-policy"]
    assert [(one["step"], one["prompt"], one["writer"]) for one in drawn] == [
        (step, "She was", writer) for step in (0, 3) for writer in ("teacher", "student")
    ]
    assert all(line["on_policy_kd"] > 0 and "data_kd" not in line for line in lines if "loss" in line)
    assert all(line["supervised_tokens"] > 4 for line in lines if "loss" in line)
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path / 'half'}", *arguments, "on_policy.fraction=0.5")
    assert code == 2 and "asked.jsonl line 1" in output and "on_policy.fraction=1" in output


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "every"), [(0, 1), (0, 4), (1, 4), (2, 3)])
def test_five_steps_and_five_are_ten_at_every_lag_and_window(config, tmp_path, lag, every):
    arguments = (*SHORT, *WRITES, f"on_policy.lag={lag}", f"on_policy.every={every}")
    whole = run_to_end(config, tmp_path / "whole", *arguments)
    run = tmp_path / "run"
    assert disaggkd("run", str(config), f"run_dir={run}", *arguments, "train.stop_at=5")[0] == 75
    run_to_end(config, run, *arguments, "--resume", "auto")
    assert weights_sha256(run) == weights_sha256(whole) and losses(run) == losses(whole)
