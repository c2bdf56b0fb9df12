"""The planner and the loss see the same shape, and its passes are those that the loss makes."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.losses import DIVERGENCES, Head, fused, fused_kd_loss, matmul
from disaggkd_cli.losses.passes import _Window
from disaggkd_cli.losses.shape import SideProducts, products_of
from disaggkd_cli.losses.tiling import choose_tiling
from disaggkd_cli.planner import loss as planner_loss

ROWS, WIDTHS = 24, (8, 12)
PASSES = {name: 3 if name in ("jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation") else 2
          for name in DIVERGENCES}  # fmt: skip


@pytest.fixture
def shapes(monkeypatch):
    """The shapes that were asked to be tiled, in order."""
    seen = []

    def tiling(shape, budget):
        seen.append(shape)
        return choose_tiling(shape, budget)

    monkeypatch.setattr(fused, "choose_tiling", tiling)
    monkeypatch.setattr(planner_loss, "_tiling", tiling)
    return seen


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabularies", [(64, 64), (80, 64), (64, 72)])
def test_the_planner_asks_for_the_shape_that_the_loss_has(shapes, divergence, dtype, vocabularies):
    student, teacher = (torch.randn(rows, width, dtype=dtype) for rows, width in zip(vocabularies, WIDTHS, strict=True))
    hidden = [torch.randn(ROWS, width, dtype=dtype) for width in WIDTHS]
    fused_kd_loss(
        hidden[0].requires_grad_(), Head(student.requires_grad_()), hidden[1], Head(teacher), divergence=divergence,
        memory_budget="1MiB",
    )  # fmt: skip
    planner_loss.fused(
        ROWS, *vocabularies, *WIDTHS, divergence, 1 << 20, dtype.itemsize, dtype.itemsize, device="cpu", compiled=False
    )
    of_loss, of_planner = shapes
    assert of_loss == of_planner
    assert of_loss.further_passes == PASSES[divergence] - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_products_from_sizes_are_those_from_tensors(monkeypatch, dtype, on_gpu):
    monkeypatch.setattr(matmul, "_multiplies_into_fp32", lambda device, dtype: on_gpu)
    hidden, weight = torch.empty(3, 8, dtype=dtype), torch.empty(5, 8, dtype=dtype)
    precision = matmul.choose_precision(hidden, weight, torch.float32)
    sizes = precision.copy_bytes(hidden, weight), precision.operand.itemsize, precision.gradient.itemsize
    assert products_of(8, dtype.itemsize, on_gpu) == SideProducts(8, *sizes)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("gradients", [False, True])
def test_the_loss_makes_as_many_passes_as_its_shape_says(monkeypatch, shapes, divergence, gradients):
    """Counted where nothing is kept: every pass after the first asks for each tile's logits again."""
    again = []
    original = _Window._logits_again
    monkeypatch.setattr(_Window, "_logits_again", lambda self, *tile: (again.append(tile[0]), original(self, *tile))[1])
    hidden, weights = [torch.randn(4, width) for width in WIDTHS], [torch.randn(40, width) for width in WIDTHS]
    fused_kd_loss(
        hidden[0].requires_grad_(gradients), Head(weights[0]), hidden[1], Head(weights[1]), divergence=divergence,
        memory_budget="1MiB",
    )  # fmt: skip
    tiles = len(set(again)) or 1
    assert len(again) == shapes[0].further_passes * tiles
    assert shapes[0].further_passes == PASSES[divergence] - 2 + gradients
