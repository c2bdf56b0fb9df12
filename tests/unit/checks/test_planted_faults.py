"""Faults that distillation code has had, each planted in one place and caught by the check named for it."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from disaggkd_cli.checks import CHECKS, run_checks
from disaggkd_cli.checks import subject as subject_module
from disaggkd_cli.checks import wire as wire_module
from disaggkd_cli.checks.result import FAIL, NOT_APPLICABLE, PASS
from disaggkd_cli.losses import Head, fused, fused_kd_loss
from disaggkd_cli.models import load_causal_lm, load_head, requested_states
from disaggkd_cli.training import checkpoint, schedule, student_module
from tests.support.runs import TINY_TEACHER

pytestmark = pytest.mark.timeout(120)


def failed(config, *names):
    """Run all checks but the last (or those named) and return the failures by name."""
    results = run_checks(config, list(names) or [name for name in CHECKS if name != "checkpoint"])
    return {result.name: result for result in results if result.outcome == FAIL}


def test_a_sound_config_passes_every_check(config_of):
    results = run_checks(config_of())
    assert [result.name for result in results] == list(CHECKS)
    assert {result.outcome for result in results} == {PASS}, [r for r in results if r.outcome != PASS]


def test_a_sound_colocated_config_has_no_wire_to_check(config_of):
    results = run_checks(config_of(mode="colocated"), ["remote states", "teacher head"])
    assert [result.outcome for result in results] == [PASS, NOT_APPLICABLE]
    assert "colocated" in results[1].why


# 1. Shifted labels


def test_labels_shifted_in_the_micro_batch(config_of, monkeypatch):
    collate = schedule.collate

    def shifted(sequences, pad_id):
        batch = collate(sequences, pad_id)
        return dataclasses.replace(batch, labels=batch.labels.roll(1, dims=1))

    monkeypatch.setattr(schedule, "collate", shifted)
    assert "are not the token that follows" in failed(config_of())["labels"].why


def test_labels_shifted_in_the_data(config_of, monkeypatch):
    def own_token(input_ids, supervised):
        return input_ids.copy()

    monkeypatch.setattr("disaggkd_cli.data.layout.flat_documents.next_token_labels", own_token)
    assert "labels" in failed(config_of())


# 2. Swapped ids


def test_two_ids_swapped_in_the_students_tokenizer(config_of, tmp_path):
    student = tmp_path / "student"
    shutil.copytree(TINY_TEACHER, student)
    state = json.loads((student / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    tokens = {index: token for token, index in vocabulary.items()}
    vocabulary[tokens[700]], vocabulary[tokens[701]] = 701, 700
    (student / "tokenizer.json").write_text(json.dumps(state))
    found = failed(config_of(student={"model": str(student)}))
    assert set(found) == {"vocabulary"}
    assert f"id 700 is {tokens[700]!r} to the teacher and {tokens[701]!r} to the student" in found["vocabulary"].why


def test_two_rows_swapped_in_the_teachers_head(config_of, monkeypatch):
    def swapped(*arguments):
        head = load_head(*arguments)
        weight = head.weight.clone()
        weight[[700, 701]] = head.weight[[701, 700]]
        return Head(weight, head.bias, head.scale, head.softcap)

    monkeypatch.setattr(subject_module, "load_head", swapped)
    assert "teacher head" in failed(config_of())


# 3. Wrong soft cap


@pytest.mark.parametrize(
    ("place", "check"),
    [("disaggkd_cli.models.load.head_semantics", "teacher head"),
     ("disaggkd_cli.models.head.head_semantics", "student head")],
)  # fmt: skip
def test_a_soft_cap_that_the_model_does_not_have(config_of, monkeypatch, place, check):
    monkeypatch.setattr(place, lambda config: (1.0, 5.0))
    assert check in failed(config_of())


def test_a_soft_cap_that_is_forgotten(config_of, model_directory, monkeypatch):
    teacher = model_directory("gemma2")
    config = config_of(teacher__model=str(teacher))
    assert list(failed(config)) == ["teacher"], "random weights: no better than guessing"
    monkeypatch.setattr("disaggkd_cli.models.load.head_semantics", lambda config: (1.0, None))
    assert set(failed(config)) == {"teacher", "teacher head"}


# 4. Leaking packing


def test_positions_that_do_not_restart(config_of, monkeypatch):
    def running_on(document_lengths, sequence_length=None):
        return torch.arange(sum(document_lengths[0])).repeat(len(document_lengths), 1)

    monkeypatch.setattr("disaggkd_cli.data.layout.micro_batch.position_ids_from_lengths", running_on)
    assert "see each other" in failed(config_of(), "packing leak")["packing leak"].why


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_masks_ignore_positions(config_of, model_directory, dtype):
    teacher = str(model_directory("gpt_oss"))
    result = failed(config_of(teacher={"model": teacher, "dtype": dtype}, data__packing="on"), "packing leak")
    assert "set data.packing=off" in result["packing leak"].why
    assert not failed(config_of(teacher={"model": teacher, "dtype": dtype}), "packing leak")


# 5. Teacher in train mode


def test_a_teacher_in_train_mode(config_of, model_directory, monkeypatch):
    config = config_of(teacher__model=str(model_directory("gpt2", resid_pdrop=0.2)))
    assert not failed(config, "teacher determinism")
    monkeypatch.setattr(subject_module, "load_causal_lm", lambda *arguments: load_causal_lm(*arguments).train())
    assert "train mode" in failed(config, "teacher determinism")["teacher determinism"].why


# 6. Wrong temperature


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_temperature_that_the_trainer_forgets(config_of, monkeypatch, temperature):
    def forgetful(*arguments, **options):
        return fused_kd_loss(*arguments, **{**options, "temperature": 3.0 - temperature})

    config = config_of(loss={"temperature": temperature})
    assert not failed(config, "fused loss", "gradients")
    monkeypatch.setattr(student_module, "fused_kd_loss", forgetful)
    assert f"temperature {temperature:g}" in failed(config)["fused loss"].why


def test_a_temperature_missing_in_the_loss_itself(config_of, monkeypatch):
    spec = fused._spec
    monkeypatch.setattr(fused, "_spec", lambda *args: dataclasses.replace(spec(*args), temperature=1.0))
    assert "fused loss" in failed(config_of(loss={"temperature": 2.0}))


# 7. Doubled gradient


def test_a_gradient_twice_as_large(config_of, monkeypatch):
    scaled = fused._scaled
    monkeypatch.setattr(fused, "_scaled", lambda gradient, factor, dtype: 2 * scaled(gradient, factor, dtype))
    found = failed(config_of())
    assert {"gradients", "fused loss"} <= set(found)
    assert found["gradients"].values["one_micro-batch"] == pytest.approx(1.0, rel=1e-3)


def test_a_mean_over_each_micro_batch(config_of, monkeypatch):
    def local_mean(*arguments, num_tokens=None, **options):
        return fused_kd_loss(*arguments, **options)

    monkeypatch.setattr(student_module, "fused_kd_loss", local_mean)
    found = failed(config_of())["gradients"]
    assert found.values["one_micro-batch"] < 1e-4 < 0.1 < found.values["accumulated_twice"]
    assert found.values["over_two_ranks"] > 0.1


# Others


def test_rows_of_another_position_on_the_wire(config_of, monkeypatch):
    monkeypatch.setattr(wire_module, "requested_states", lambda *arguments: requested_states(*arguments).roll(1, 0))
    assert set(failed(config_of())) == {"remote states"}


def test_a_teacher_that_cannot_answer_is_said_and_does_not_hang(config_of, monkeypatch):
    def broken(*arguments):
        raise ValueError("no such expert")

    monkeypatch.setattr(wire_module, "requested_states", broken)
    assert "no such expert" in failed(config_of(), "remote states")["remote states"].why


def test_the_teachers_entropy_in_the_loss(config_of, monkeypatch):
    def cross_entropy_of_distributions(*arguments, **options):
        out = fused_kd_loss(*arguments, **options)
        return dataclasses.replace(out, loss=out.loss + 0.8018)

    monkeypatch.setattr("disaggkd_cli.checks.loss.fused_kd_loss", cross_entropy_of_distributions)
    assert "zero loss" in failed(config_of(), "zero loss")


def test_a_checkpoint_that_forgets_the_optimizer(config_of, monkeypatch):
    state = checkpoint.training_state

    def without_second_moments(module, optimizer):
        return {name: t for name, t in state(module, optimizer).items() if not name.endswith("exp_avg_sq")}

    monkeypatch.setattr(checkpoint, "training_state", without_second_moments)
    assert "came back changed" in failed(config_of(), "checkpoint")["checkpoint"].why


def test_supervised_padding(config_of, monkeypatch):
    collate = schedule.collate

    def careless(sequences, pad_id):
        batch = collate(sequences, pad_id)
        return dataclasses.replace(batch, labels=torch.where(batch.labels == -100, pad_id, batch.labels))

    monkeypatch.setattr(schedule, "collate", careless)
    assert "masks" in failed(config_of(), "masks")


# 8. A teacher that knows nothing


def test_a_teacher_with_a_weight_that_is_no_number(config_of, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY_TEACHER)
    with torch.no_grad():
        model.get_input_embeddings().weight[2047, 3] = float("nan")  # of an id that the texts may never use
    model.save_pretrained(tmp_path / "nan")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_TEACHER / file, tmp_path / "nan" / file)
    config = config_of(teacher__model=str(tmp_path / "nan"), student={"model": str(TINY_TEACHER)}, mode="colocated")
    assert "model.embed_tokens.weight (1 of 262,144 values are NaN)" in failed(config, "teacher")["teacher"].why


def test_a_trained_teacher_passes_and_its_loss_is_shown(config_of):
    (result,) = run_checks(config_of(), ["teacher"])
    assert result.outcome == PASS
    assert result.values["teacher_loss"] < result.values["student_loss"] and "guessing 7.62" in result.figure
