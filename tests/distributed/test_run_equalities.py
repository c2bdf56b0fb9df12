"""The loss is the same wherever the teacher lives and however a global batch is cut."""

import pytest

from tests.support.runs import losses, metrics, run_to_end, weights_sha256

STEPS = 20


def assert_same_losses(run, reference):
    mine, theirs = losses(run), losses(reference)
    assert len(mine) == len(theirs) == STEPS
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_learning_happens(reference):
    assert losses(reference)[-1] < 0.8 * losses(reference)[0]


def test_a_teacher_elsewhere_gives_the_same_run_to_the_last_bit(reference_config, tmp_path, reference):
    together = run_to_end(reference_config, tmp_path / "together", "mode=colocated")
    assert losses(together) == losses(reference)
    assert weights_sha256(together) == weights_sha256(reference)


def test_the_bytes_on_the_wire_are_the_rows(reference):
    """A payload has rows x hidden size x 4 bytes (float32 on the wire); a step's line counts its own rows only."""
    steps = [line for line in metrics(reference) if "loss" in line]
    for line in steps:
        assert line["received_bytes"] == line["supervised_tokens"] * 128 * 4
    evaluations = [line["eval_received_bytes"] for line in metrics(reference) if "eval_kd" in line]
    assert len(set(evaluations)) == 1 and evaluations[0] % (128 * 4) == 0 and evaluations[0] > 0
    # The links' totals count all of it; the last evaluation may be on the way when the last step is written.
    total = sum(one["received_bytes"] for one in steps[-1]["teachers"].values())
    steps_alone = sum(line["received_bytes"] for line in steps)
    assert steps_alone + sum(evaluations[:-1]) <= total <= steps_alone + sum(evaluations)


@pytest.mark.slow
def test_two_student_ranks_with_the_teacher_elsewhere(reference_config, tmp_path, reference):
    run = run_to_end(reference_config, tmp_path / "two_ranks", "student.ranks=2", "train.micro_batch_sequences=2")
    assert_same_losses(run, reference)


def test_two_student_ranks_with_the_teacher_sharded_over_them(reference_config, tmp_path, reference):
    arguments = ("mode=colocated", "student.ranks=2", "train.micro_batch_sequences=2")
    assert_same_losses(run_to_end(reference_config, tmp_path / "colocated_two", *arguments), reference)


@pytest.mark.slow
def test_accumulation(reference_config, tmp_path, reference):
    arguments = ("train.micro_batch_sequences=2", "train.accumulation=2")
    run = run_to_end(reference_config, tmp_path / "accumulated", *arguments)
    assert_same_losses(run, reference)


def test_accumulation_over_two_ranks_two_teachers_and_a_ring_of_one(reference_config, tmp_path, reference):
    run = run_to_end(
        reference_config, tmp_path / "everything", "student.ranks=2", "train.micro_batch_sequences=1",
        "train.accumulation=2", "teacher.replicas=2", "transport.ring_depth=1",
    )  # fmt: skip
    assert_same_losses(run, reference)
    teachers = metrics(run)[-2]["teachers"]
    assert len(teachers) == 2


def test_full_logits_and_fused(reference_config, tmp_path, reference):
    run = run_to_end(reference_config, tmp_path / "full", "mode=colocated", "loss.implementation=full")
    assert_same_losses(run, reference)
