"""What sums over rows are divided by, and when: never below one, and for float16 after the caller's loss scale."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.losses import fused_kd_loss, reference_kd_loss

from .loss_cases import make_case, relative_error


@pytest.mark.parametrize("loss", [fused_kd_loss, reference_kd_loss])
@pytest.mark.parametrize("count", [0, 0.25, 1])
def test_counts_below_one_are_one_as_number_and_as_tensor(loss, count, seed):
    case = make_case(seed)
    expected = case.copy().run(loss, num_tokens=1).loss.item()
    for given in (count, torch.tensor(count), torch.tensor([float(count)])):
        assert case.copy().run(loss, num_tokens=given).loss.item() == pytest.approx(expected, rel=1e-12)


def test_without_supervised_rows_the_loss_is_zero(seed):
    case = make_case(seed)
    case.labels.fill_(-100)
    out = case.run(fused_kd_loss, ce_weight=0.5)
    out.loss.backward()
    assert out.loss.item() == 0.0 and not case.student_hidden.grad.any()


def test_small_gradients_in_float16_survive_until_the_loss_scale_lifts_them(seed):
    """Divided by the count before they are rounded, most would vanish below float16's smallest number."""
    half = make_case(seed, dtype=torch.float16)
    exact = half.copy(torch.float64)
    scale, count = 2.0**24, 10**9
    for case in (half, exact):
        (case.run(fused_kd_loss, num_tokens=count).loss.double() * scale).backward()
    assert relative_error(half.student_hidden.grad, exact.student_hidden.grad) < 2e-3


def test_bfloat16_gradients_are_rounded_once(seed):
    """Divided by the count after their rounding, two fifths would be another number than the exact one's rounding."""
    low = make_case(seed, rows=64, student_width=32, dtype=torch.bfloat16)
    exact = low.copy(torch.float64)
    for case in (low, exact):
        case.run(fused_kd_loss, num_tokens=13).loss.backward()
    same = low.student_hidden.grad == exact.student_hidden.grad.to(torch.bfloat16)
    assert same.float().mean() > 0.9
