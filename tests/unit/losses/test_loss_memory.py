"""Scratch is bounded by the budget alone, and nothing of rows times vocabulary is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from disaggkd_cli.bench.peak import peak_extra_bytes
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import fused_kd_loss
from disaggkd_cli.losses.tiling import LossShape, choose_tiling

from .loss_cases import make_case

CPU = torch.device("cpu")


def _scratch(seed: int, budget: int, rows: int, vocabulary: int, **kind) -> int:
    """Peak bytes of a loss beside its gradients."""
    options = {key: kind.pop(key) for key in ("divergence", "compile_pointwise") if key in kind}
    case = make_case(seed, rows, vocabulary, student_width=16, teacher_width=24, **{"dtype": torch.float32, **kind})
    held = []
    peak = peak_extra_bytes(
        lambda: held.append(case.run(fused_kd_loss, ce_weight=0.5, memory_budget=budget, **options)), CPU
    )
    hidden, weight = case.student_hidden, case.student_head.weight
    # dW accumulates in float32 whatever the weight's dtype.
    return peak - hidden.numel() * hidden.element_size() - weight.numel() * 4


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("budget", [2**19, 2**20])
@pytest.mark.parametrize(
    "kind",
    [
        dict(),
        dict(masked=True, teacher_vocabulary=1750),
        dict(dtype=torch.bfloat16, bias=True, softcap=5.0),
        dict(masked=True, teacher_vocabulary=2250, scale=0.5),
    ],
)
def test_scratch_stays_within_the_budget(divergence, budget, kind, seed):
    assert _scratch(seed, budget, 150, 2048, divergence=divergence, **kind) <= budget


def test_scratch_does_not_grow_with_rows_or_vocabulary(seed):
    budget = 2**23
    base = _scratch(seed, budget, 1024, 8192)
    for rows, vocabulary in ((2048, 8192), (1024, 16384)):
        assert _scratch(seed, budget, rows, vocabulary) <= min(1.06 * base, budget)


def test_what_waits_for_backward_is_the_gradients(seed):
    case = make_case(seed, 200, 5000, student_width=16, teacher_width=24, dtype=torch.float32)
    saved: list[int] = []

    def record(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = case.run(fused_kd_loss).loss
    gradients = loss.grad_fn.gradients
    kept = sum(saved) + sum(gradient.numel() for gradient in gradients if gradient is not None)
    assert kept == 200 * 16 + 5000 * 16


def test_evaluation_keeps_no_gradient_memory(seed):
    case = make_case(seed, 200, 5000, student_width=16, teacher_width=24, dtype=torch.float32)
    with torch.no_grad():
        assert peak_extra_bytes(lambda: case.run(fused_kd_loss, memory_budget=2**18), CPU) <= 2**18


@pytest.mark.parametrize("rows, vocabulary", [(2048, 32768), (8192, 32768), (2048, 131072)])
@pytest.mark.parametrize("budget", [8 << 20, 64 << 20, 256 << 20])
def test_the_cost_model_fills_the_budget_whatever_the_shape(rows, vocabulary, budget):
    tiling = choose_tiling(LossShape(rows, vocabulary, 512, 1024), budget)
    assert 0.95 * budget <= tiling.scratch_bytes <= budget


def test_the_cost_model_keeps_logits_where_they_fit_and_the_wider_side_first():
    ample = choose_tiling(LossShape(256, 8192, 64, 128), 2**26)
    shards = -(-8192 // ample.shard)
    assert (ample.student_kept, ample.teacher_kept) == (shards, shards)
    assert ample.gemm_flops == 2 * 256 * 8192 * (3 * 64 + 128)
    scarce = choose_tiling(LossShape(2048, 131072, 64, 128), 2**22)
    assert scarce.student_kept == 0
    assert scarce.gemm_flops <= 2 * 2048 * 131072 * (4 * 64 + 2 * 128)


def test_a_budget_below_the_smallest_tile_is_named(seed):
    with pytest.raises(
        UserError, match=r"memory_budget=100 B is too small.*needs [0-9.]+ KiB; raise loss.memory_budget"
    ):
        make_case(seed).run(fused_kd_loss, memory_budget=100)


def test_the_cost_model_imports_no_torch():
    code = "import sys, disaggkd_cli.losses.tiling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
