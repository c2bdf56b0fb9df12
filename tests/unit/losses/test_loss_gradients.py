"""Value and gradients of the fused loss against autograd over full logits, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss

from .loss_cases import make_case, relative_error

SHAPES = [(37, 53, 53), (5, 101, 90), (12, 61, 77)]
BUDGETS = ["1MiB", 24_000]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("softcap, scale, bias", [(None, 1.0, False), (3.0, 0.7, True)])
def test_equals_full_logits(divergence, softcap, scale, bias, seed):
    for (rows, vocabulary, teacher_vocabulary), budget, temperature, (labels, masked) in itertools.product(
        SHAPES, BUDGETS, (0.5, 1.0, 2.0), ((False, False), (True, False), (True, True))
    ):
        options = dict(divergence=divergence, temperature=temperature, beta=0.3, kd_weight=0.8)
        options["ce_weight"] = 0.4 if labels else 0.0
        fused = make_case(
            seed,
            rows,
            vocabulary,
            teacher_vocabulary,
            bias=bias,
            scale=scale,
            softcap=softcap,
            labels=labels,
            masked=masked,
        )
        full = fused.copy()
        found = fused.run(fused_kd_loss, memory_budget=budget, **options)
        truth = full.run(reference_kd_loss, **options)
        for name in found.__dataclass_fields__:
            torch.testing.assert_close(getattr(found, name), getattr(truth, name), rtol=1e-11, atol=1e-12, msg=name)
        (found.loss * -1.7).backward()
        (truth.loss * -1.7).backward()
        for ours, theirs in zip(fused.gradients(), full.gradients(), strict=True):
            assert relative_error(ours, theirs) < 1e-11


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_evaluation_equals_training(divergence, seed):
    case = make_case(seed, masked=True)
    options = dict(divergence=divergence, ce_weight=0.5, temperature=2.0)
    trained = case.run(fused_kd_loss, **options)
    with torch.no_grad():
        for budget in ("1MiB", 24_000):
            evaluated = case.run(fused_kd_loss, memory_budget=budget, **options)
            assert not evaluated.loss.requires_grad
            torch.testing.assert_close(evaluated.loss, trained.loss.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck(divergence, seed):
    case = make_case(seed, rows=4, vocabulary=9, student_width=3, teacher_width=2, bias=True, softcap=4.0, masked=True)

    def loss(hidden, weight, bias):
        head = Head(weight, bias, softcap=4.0)
        return fused_kd_loss(
            hidden, head, case.teacher_hidden, case.teacher_head, case.labels, divergence, 1.5, 0.4, ce_weight=0.3
        ).loss

    # Total variation has a kink where p = q; random logits stay clear of it.
    leaves = (case.student_hidden, case.student_head.weight, case.student_head.bias)
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_gradients_not_asked_for_are_not_made(frozen, seed):
    fused, full = (make_case(seed, bias=True) for _ in range(2))
    for case in (fused, full):
        leaf = case.student_hidden if frozen == "hidden" else getattr(case.student_head, frozen)
        leaf.requires_grad_(False)
    fused.run(fused_kd_loss, ce_weight=0.5).loss.backward()
    full.run(reference_kd_loss, ce_weight=0.5).loss.backward()
    for ours, theirs in zip(fused.gradients(), full.gradients(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert relative_error(ours, theirs) < 1e-11


def test_the_teacher_never_gets_a_gradient(seed):
    case = make_case(seed)
    case.teacher_hidden.requires_grad_()
    case.teacher_head.weight.requires_grad_()
    case.run(fused_kd_loss).loss.backward()
    assert case.teacher_hidden.grad is None and case.teacher_head.weight.grad is None


def test_tied_embedding_gets_both_gradients(seed):
    ids = torch.tensor([3, 1, 3, 9])
    grads = []
    for loss in (fused_kd_loss, reference_kd_loss):
        case = make_case(seed, rows=4, vocabulary=13)
        weight = case.student_head.weight
        loss(torch.tanh(weight[ids]), Head(weight), case.teacher_hidden, case.teacher_head).loss.backward()
        grads.append(weight.grad)
    assert relative_error(*grads) < 1e-11


def test_gradients_accumulate_over_micro_batches(seed):
    whole = make_case(seed, rows=30)
    parts = whole.copy()
    whole.run(fused_kd_loss, ce_weight=0.5).loss.backward()
    for rows in (slice(0, 7), slice(7, 8), slice(8, 8), slice(8, 30)):
        fused_kd_loss(
            parts.student_hidden[rows], parts.student_head, parts.teacher_hidden[rows], parts.teacher_head,
            parts.labels[rows], ce_weight=0.5, num_tokens=torch.tensor(30),
        ).loss.backward()  # fmt: skip
    for ours, theirs in zip(parts.gradients(), whole.gradients(), strict=True):
        assert relative_error(ours, theirs) < 1e-11


def test_a_second_backward_raises(seed):
    case = make_case(seed, dtype=torch.float32)
    loss = case.run(fused_kd_loss).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="computes its gradients once"):
        loss.backward()


def test_labels_at_the_edges_of_shards(seed):
    # 24000 bytes cut 53 columns into shards of 32 and 21 or less; labels stand at each possible edge.
    case = make_case(seed, rows=53)
    case.labels = torch.arange(53)
    full = case.copy()
    found = case.run(fused_kd_loss, ce_weight=1.0, memory_budget=24_000)
    expected = full.run(reference_kd_loss, ce_weight=1.0)
    assert found.ce.item() == pytest.approx(expected.ce.item(), rel=1e-11)
    found.loss.backward()
    expected.loss.backward()
    for ours, theirs in zip(case.gradients(), full.gradients(), strict=True):
        assert relative_error(ours, theirs) < 1e-11
