"""Agreement compares the first of the likeliest shared ids, however the work is cut; a tie alone is no agreement."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss

from .loss_cases import logits_case


def _agreement(teacher: torch.Tensor, student: torch.Tensor, **options) -> list[float]:
    """Of the reference and of the fused loss with one tile and with many."""
    case = logits_case(teacher, student)
    outs = [case.run(reference_kd_loss, **options)]
    outs += [case.run(fused_kd_loss, memory_budget=budget, **options) for budget in ("4MiB", 40_000, 16_000)]
    return [out.top1_agreement.item() for out in outs]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("sizes", [(67, 67), (67, 80), (80, 67)])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_of_logits_full_of_ties(divergence, sizes, temperature, seed):
    draw = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randint(-2, 3, (23, size), generator=draw).double() for size in sizes)
    # Half of the rows share their first maximum, the others any one.
    first = torch.randint(0, 60, (12,), generator=draw)
    for logits in (teacher, student):
        logits[torch.arange(12), first] = 5.0
        logits[torch.arange(12), first + 3] = 5.0
    expected = (teacher[:, :67].argmax(-1) == student[:, :67].argmax(-1)).double().mean().item()
    assert 0.5 <= expected
    found = _agreement(teacher, student, divergence=divergence, temperature=temperature)
    assert found == pytest.approx([expected] * 4, abs=1e-12)


def test_a_teacher_of_constant_logits_agrees_by_its_first_id_only(seed):
    draw = torch.Generator().manual_seed(seed)
    student = torch.randn(40, 67, generator=draw, dtype=torch.float64)
    student[:, 0] = -9.0
    student[:3, 0] = 9.0
    for constant in (0.0, -3.5):
        teacher = torch.full((40, 67), constant, dtype=torch.float64)
        assert _agreement(teacher, student) == pytest.approx([3 / 40] * 4)
        assert _agreement(student, teacher) == pytest.approx([3 / 40] * 4)


def test_ties_across_the_borders_of_tiles():
    """The teacher's maximum stands at ids of several tiles; the student names the first of them, or a later one."""
    places = [5, 21, 37, 66]
    teacher = torch.zeros(4, 67, dtype=torch.float64)
    teacher[:, places] = 1.0
    student = torch.zeros(4, 67, dtype=torch.float64)
    student[range(4), places] = 2.0
    assert _agreement(teacher, student) == pytest.approx([0.25] * 4)
    student[:, 5] = 2.0
    assert _agreement(teacher, student) == pytest.approx([1.0] * 4)


def test_masked_first_ids_are_not_the_likeliest():
    """Whole tiles of minus infinity before a maximum below zero."""
    teacher = torch.full((6, 67), -8.0, dtype=torch.float64)
    teacher[:, 40] = -7.0
    student = teacher.clone()
    teacher[:, :36] = student[:, :36] = float("-inf")
    student[3:, 50] = -6.0
    eye = torch.eye(67, dtype=torch.float64)
    masked = torch.zeros(67, dtype=torch.float64)
    masked[:36] = float("-inf")
    finite = [torch.where(logits.isinf(), 0.0, logits) for logits in (teacher, student)]
    head = Head(eye, masked)
    for budget in ("4MiB", 16_000):
        out = fused_kd_loss(finite[1], head, finite[0], head, memory_budget=budget)
        assert out.top1_agreement.item() == 0.5
