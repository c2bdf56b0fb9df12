"""How often the loss passes over the logits: the number that its kernels, its tiling and the plan must agree on."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disaggkd_cli.losses import DIVERGENCES, fused_kd_loss
from disaggkd_cli.planner.loss import fused

from .loss_cases import make_case

ROWS, VOCABULARY, STUDENT, TEACHER = 64, 512, 8, 24
FURTHER = {"forward_kl": 1, "reverse_kl": 1, "symmetric_kl": 1}
"""Passes after the first; the others need one for their value and one for the gradient."""


class Products(TorchDispatchMode):
    """Counts the floating point operations of matrix products, of those in place too."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        assert name not in ("bmm", "baddbmm", "matmul", "linear")
        if name in ("mm", "addmm"):
            left, right = arguments[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*arguments, **(keywords or {}))


def case_of(seed):
    """As in training: some row is not supervised."""
    case = make_case(seed, ROWS + 1, VOCABULARY, student_width=STUDENT, teacher_width=TEACHER, dtype=torch.float32)
    case.labels[ROWS // 2] = -100
    return case


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("keeps", [True, False])
def test_matrix_products_are_those_of_the_plan(divergence, keeps, seed):
    budget = 2**24 if keeps else 60_000
    with Products() as counter:
        case_of(seed).run(fused_kd_loss, divergence=divergence, memory_budget=budget, compile_pointwise=False)
    work = fused(ROWS, VOCABULARY, VOCABULARY, STUDENT, TEACHER, divergence, budget, 4, 4, device="cpu", compiled=False)
    assert counter.flops == work.flops_per_row * ROWS
    further = FURTHER.get(divergence, 2)
    once = 2 * VOCABULARY * (STUDENT + TEACHER)
    gradients = 2 * VOCABULARY * 2 * STUDENT
    if keeps:
        assert work.flops_per_row == once + gradients
    else:
        assert once * further < work.flops_per_row - gradients <= once * (1 + further)


def test_evaluation_passes_once_unless_the_value_takes_a_pass_of_its_own(seed):
    products = {}
    for divergence in ("forward_kl", "total_variation"):
        with Products() as counter, torch.no_grad():
            case_of(seed).run(fused_kd_loss, divergence=divergence, memory_budget=60_000, compile_pointwise=False)
        products[divergence] = counter.flops / (2 * ROWS * VOCABULARY * (STUDENT + TEACHER))
    assert products["forward_kl"] == 1
    assert 1 < products["total_variation"] <= 2
