"""The path that GPUs take: bf16 operands, float32 results. Played on the CPU, which cannot multiply so by itself."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.bench.peak import peak_extra_bytes
from disaggkd_cli.losses import fused_kd_loss, matmul, passes, reference_kd_loss

from .loss_cases import make_case, relative_error


@pytest.fixture(params=["adds in the product", "adds through a buffer"])
def gpu_products(request, monkeypatch):
    """Products as CUDA makes them: operands stay bf16, sums are float32. Returns the dtypes that operands had."""
    seen = set()
    adds = request.param == "adds in the product"

    def exact(left, right):
        seen.update({left.dtype, right.dtype})
        return left.float() @ right.float()

    def product_into(out, left, right):
        out.copy_(exact(left, right))

    def add_product(out, left, right, first):
        product = exact(left, right)
        out.copy_(product) if first else out.add_(product)

    monkeypatch.setattr(matmul, "_multiplies_into_fp32", lambda device, dtype: True)
    monkeypatch.setattr(matmul, "_adds_into_fp32", lambda device, dtype: adds)
    monkeypatch.setattr(passes, "product_into", product_into)
    monkeypatch.setattr(passes, "add_product", add_product)
    return seen


@pytest.mark.parametrize("kind", [{}, {"masked": True, "bias": True, "softcap": 5.0}, {"teacher_vocabulary": 330}])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
def test_gradients_lose_no_more_than_one_rounding(gpu_products, divergence, kind, seed):
    case = make_case(seed, 61, 301, student_width=24, teacher_width=40, dtype=torch.bfloat16, **kind)
    truth = case.copy(torch.float64)
    options = dict(divergence=divergence, temperature=2.0, ce_weight=0.5)
    found = case.run(fused_kd_loss, memory_budget=300_000, compile_pointwise=False, **options)
    right = truth.run(reference_kd_loss, **options)
    found.loss.backward()
    right.loss.backward()
    assert gpu_products == {torch.bfloat16}, "operands are taken as they are"
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-4)
    for ours, best in zip(case.gradients(), truth.gradients(), strict=True):
        assert relative_error(ours, best) < 4e-3


def test_half_precision_gradients_are_multiplied_in_float32(gpu_products, seed):
    """fp16 would lose small gradients; only the logits' products take it."""
    case = make_case(seed, 61, 301, student_width=24, teacher_width=40, dtype=torch.float16)
    truth = case.copy(torch.float64)
    case.run(fused_kd_loss, memory_budget=300_000).loss.backward()
    truth.run(reference_kd_loss).loss.backward()
    assert gpu_products == {torch.float16, torch.float32}
    assert relative_error(case.student_head.weight.grad, truth.student_head.weight.grad) < 2e-3


def test_scratch_of_the_path_stays_within_the_budget(gpu_products, seed, monkeypatch):
    budget, sizes = 2**19, []

    def no_product(out, left, right, *first):
        sizes.append(out.numel())

    # Products without temporaries of their own, as the library's are.
    monkeypatch.setattr(passes, "product_into", no_product)
    monkeypatch.setattr(passes, "add_product", no_product)
    case = make_case(seed, 128, 2048, student_width=16, teacher_width=24, dtype=torch.bfloat16)
    held = []
    peak = peak_extra_bytes(
        lambda: held.append(case.run(fused_kd_loss, memory_budget=budget, compile_pointwise=False)), torch.device("cpu")
    )
    hidden, weight = case.student_hidden, case.student_head.weight
    assert sizes
    assert peak - hidden.numel() * 2 - weight.numel() * 4 <= budget
