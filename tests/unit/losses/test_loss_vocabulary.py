"""Vocabularies of different size: shared ids are compared, the rest is masked exactly and reported."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss

from .loss_cases import logits_case, make_case, relative_error

LOSSES = [fused_kd_loss, reference_kd_loss]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("vocabulary, teacher_vocabulary", [(61, 77), (77, 61), (20, 19), (1, 5)])
def test_equals_slicing_and_renormalising(loss, divergence, vocabulary, teacher_vocabulary, seed):
    case = make_case(seed, vocabulary=vocabulary, teacher_vocabulary=teacher_vocabulary, bias=True, labels=False)
    sliced = case.copy()
    shared = min(vocabulary, teacher_vocabulary)
    weight, bias = sliced.student_head.weight, sliced.student_head.bias
    sliced.student_head = Head(weight[:shared], bias[:shared])
    sliced.teacher_head = sliced.teacher_head.rows(0, shared)
    found, truth = (one.run(loss, divergence=divergence, temperature=1.7) for one in (case, sliced))
    assert found.loss.item() == pytest.approx(truth.loss.item(), rel=1e-11, abs=1e-14)
    found.loss.backward()
    truth.loss.backward()
    # Gradients of ids that the teacher lacks are exactly zero.
    assert (case.student_head.weight.grad[shared:] == 0).all() and (case.student_head.bias.grad[shared:] == 0).all()
    for ours, theirs in ((case.student_hidden, sliced.student_hidden), (case.student_head.weight, weight)):
        assert relative_error(ours.grad, theirs.grad) < 1e-10 or theirs.grad.norm() < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("constant", [-50.0, -1.0, 0.0, 3.0, 80.0])
def test_a_smaller_student_is_not_padded_with_copies(loss, constant):
    # The teacher's third id is unknown to the student; over the shared two both are uniform.
    teacher = torch.tensor([[0.0, 0.0, 3.0]], dtype=torch.float64)
    student = torch.full((1, 2), constant, dtype=torch.float64)
    out = logits_case(teacher, student).run(loss)
    assert out.loss.item() == pytest.approx(0, abs=1e-14)
    dropped = torch.softmax(teacher, -1)[0, 2].item()
    assert out.dropped_teacher_mass.item() == pytest.approx(dropped)
    assert out.dropped_student_mass.item() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_dropped_mass_of_a_larger_student_is_at_the_temperature_of_the_loss(loss, seed):
    case = make_case(seed, rows=9, vocabulary=31, teacher_vocabulary=24)
    out = case.run(loss, temperature=2.0)
    tempered = torch.softmax(case.student_hidden @ case.student_head.weight.T / 2, -1)
    assert out.dropped_student_mass.item() == pytest.approx(tempered[:, 24:].sum(-1).mean().item())
    assert out.dropped_teacher_mass.item() == 0


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cross_entropy_is_over_the_whole_student_vocabulary(temperature, seed):
    case = make_case(seed, rows=31, vocabulary=31, teacher_vocabulary=24)
    case.labels = torch.arange(31)
    full = case.copy()
    out = case.run(fused_kd_loss, ce_weight=1.0, temperature=temperature, memory_budget=24_000)
    logits = case.student_hidden @ case.student_head.weight.T
    assert out.ce.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, case.labels).item())
    out.loss.backward()
    full.run(reference_kd_loss, ce_weight=1.0, temperature=temperature).loss.backward()
    for ours, theirs in zip(case.gradients(), full.gradients(), strict=True):
        assert relative_error(ours, theirs) < 1e-11
