"""Extreme logits, mixed dtypes, precision against float64, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch

from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss

from .loss_cases import Case, logits_case, make_case, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("student_dtype, teacher_dtype", list(itertools.product(DTYPES, DTYPES)))
def test_extreme_logits_stay_finite(divergence, student_dtype, teacher_dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    # In fp16 the gradient at the largest logits is beyond the format.
    for size in (1e-3, 1.0, 300.0, *([] if student_dtype == torch.float16 else [30_000.0])):
        teacher = (torch.randn(19, 67, generator=draw) * size).clamp(-6e4, 6e4).to(teacher_dtype)
        student = (torch.randn(19, 67, generator=draw) * size).clamp(-6e4, 6e4).to(student_dtype)
        case = logits_case(teacher, student, torch.randint(0, 67, (19,), generator=draw))
        out = case.run(fused_kd_loss, divergence=divergence, ce_weight=0.5, temperature=0.7)
        out.loss.backward()
        assert torch.isfinite(out.loss) and out.kd.item() >= 0
        assert all(torch.isfinite(gradient).all() for gradient in case.gradients())


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_ids_masked_by_a_bias_of_minus_infinity(divergence, seed):
    case = make_case(seed, vocabulary=53, bias=True, labels=False)
    with torch.no_grad():
        for head in (case.student_head, case.teacher_head):
            head.bias[40:] = float("-inf")
    shorter = case.copy()
    weight, bias = shorter.student_head.weight, shorter.student_head.bias
    shorter.student_head = Head(weight[:40], bias[:40])
    shorter.teacher_head = shorter.teacher_head.rows(0, 40)
    for budget in ("1MiB", 24_000):
        one = case.copy()
        found = one.run(fused_kd_loss, divergence=divergence, memory_budget=budget)
        truth = shorter.run(reference_kd_loss, divergence=divergence)
        assert found.loss.item() == pytest.approx(truth.loss.item(), rel=1e-11)
        found.loss.backward()
        assert torch.isfinite(one.student_hidden.grad).all() and torch.isfinite(one.student_head.weight.grad).all()
        assert (one.student_head.weight.grad[40:] == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("rows", [0, 6])
def test_no_supervised_row_gives_a_connected_zero(divergence, rows, seed):
    case = make_case(seed, rows=rows)
    case.labels = torch.full((rows,), -100)
    out = case.run(fused_kd_loss, divergence=divergence, ce_weight=1.0)
    assert out.loss.item() == 0 and out.loss.requires_grad
    out.loss.backward()
    assert all((gradient == 0).all() for gradient in case.gradients())


def test_rows_that_do_not_count_may_hold_anything(seed):
    case = make_case(seed, rows=12, masked=True)
    clean = case.copy()
    with torch.no_grad():
        case.student_hidden[::3] = float("nan")
        case.teacher_hidden[::3] = float("inf")
    found, truth = (one.run(fused_kd_loss, ce_weight=1.0) for one in (case, clean))
    assert found.loss.item() == truth.loss.item()
    found.loss.backward()
    assert torch.isfinite(case.student_head.weight.grad).all() and (case.student_hidden.grad[::3] == 0).all()


def _near_teacher(seed: int, distance: float, rows: int, vocabulary: int, width: int) -> Case:
    """bf16 inputs whose student approaches the teacher with `distance`."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=draw) * 0.3
    hidden = torch.randn(rows, width, generator=draw)
    near = hidden + distance * torch.randn(rows, width, generator=draw)
    return Case(near.bfloat16(), Head(weight.bfloat16()), hidden.bfloat16(), Head(weight.bfloat16()), None).copy()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("distance", [3.0, 0.3, 0.04])
def test_bf16_gradients_stay_precise_near_convergence(divergence, distance, seed):
    case = _near_teacher(seed, distance, 252, 507, 123)
    truth, full = case.copy(torch.float64), case.copy()
    out = case.run(fused_kd_loss, divergence=divergence, memory_budget="1MiB")
    out.loss.backward()
    exact = truth.run(reference_kd_loss, divergence=divergence)
    exact.loss.backward()
    full.run(reference_kd_loss, divergence=divergence).loss.backward()
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4)
    for ours, theirs, rounded in zip(case.gradients(), truth.gradients(), full.gradients(), strict=True):
        # One rounding to bf16 at the end is 0.17 %.
        assert relative_error(ours, theirs) <= 2e-3
        assert relative_error(ours, theirs) <= relative_error(rounded, theirs) + 1e-4


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_errors_are_no_larger_than_those_of_full_logits(divergence, dtype, tolerance, seed):
    for rows, vocabulary, width in ((252, 507, 123), (31, 1031, 17)):
        case = make_case(seed, rows, vocabulary, vocabulary - 5, width, width + 1, dtype=dtype, masked=True)
        full, truth = case.copy(), case.copy(torch.float64)
        options = dict(divergence=divergence, ce_weight=0.5, temperature=2.0)
        for one in (case, full, truth):
            one.run(fused_kd_loss if one is case else reference_kd_loss, **options).loss.backward()
        for ours, rounded, exact in zip(case.gradients(), full.gradients(), truth.gradients(), strict=True):
            assert relative_error(ours, exact) <= relative_error(rounded, exact) + tolerance


def test_autocast_rounds_operands_and_keeps_the_dtypes_of_gradients(seed):
    case = make_case(seed, 64, 301, dtype=torch.float32)
    full = case.copy()
    outputs = []
    for one, loss in ((case, fused_kd_loss), (full, reference_kd_loss)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = one.run(loss, ce_weight=0.5)
        out.loss.backward()
        outputs.append(out.loss.item())
        assert all(gradient.dtype == torch.float32 for gradient in one.gradients())
    rounded = case.copy(torch.bfloat16).run(fused_kd_loss, ce_weight=0.5).loss.item()
    assert outputs[0] == pytest.approx(rounded, rel=1e-5)
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-2)
    for ours, theirs in zip(case.gradients(), full.gradients(), strict=True):
        assert relative_error(ours, theirs) < 2e-2


def test_small_gradients_in_fp16_survive_until_a_loss_scale_lifts_them(seed):
    """Divided by the tokens before they are rounded to fp16, all of them would be zero."""
    case = make_case(seed, dtype=torch.float16)
    truth, tokens = case.copy(torch.float64), 2.0**26
    for one, loss in ((case, fused_kd_loss), (truth, reference_kd_loss)):
        (one.run(loss, ce_weight=0.5, num_tokens=tokens).loss * tokens).backward()
    for ours, exact in zip(case.gradients(), truth.gradients(), strict=True):
        assert relative_error(ours, exact) < 1e-3
