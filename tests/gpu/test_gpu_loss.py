"""The fused loss on a GPU against full logits in float64 on the same values."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.bench.peak import peak_extra_bytes
from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss
from disaggkd_cli.losses.matmul import choose_precision, needs_sum_buffer

# Rounding the gradient tiles to bf16 once, and the result once more, leaves about this much.
BF16_ERROR = 4e-3


def leaves(device, dtype, rows=512, vocabulary=5000, student_width=256, teacher_width=192, seed=0):
    """Hidden states and heads of both sides, and labels of which some do not count."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(height, width, size):
        return (torch.randn(height, width, generator=draw, device=device) * size).to(dtype)

    tensors = [
        normal(rows, student_width, 1.0).requires_grad_(),
        normal(vocabulary, student_width, 3 * student_width**-0.5).requires_grad_(),
        normal(rows, teacher_width, 1.0),
        normal(vocabulary, teacher_width, 3 * teacher_width**-0.5),
    ]
    labels = torch.randint(0, vocabulary, (rows,), generator=draw, device=device)
    labels[::7] = -100
    return [*tensors, labels]


def exact(tensors):
    """The same values as leaves in float64."""
    return [
        tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for tensor in tensors
    ]


def run(loss, tensors, **options):
    """Loss and the gradients of hidden states and head."""
    hidden, weight, teacher_hidden, teacher_weight, labels = tensors
    out = loss(hidden, Head(weight), teacher_hidden, Head(teacher_weight), labels, ce_weight=0.3, **options)
    out.loss.backward()
    return out, (hidden.grad, weight.grad)


def relative(found, truth):
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


DTYPES = {"bf16": (torch.bfloat16, BF16_ERROR), "fp32": (torch.float32, 2e-5)}
EAGER = [(divergence, dtype, False) for divergence in DIVERGENCES for dtype in DTYPES]
# Compiling takes seconds; one divergence of each kind stands for all. The code is the same.
COMPILED = [("forward_kl", "bf16", True), ("jsd", "bf16", True)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("divergence, precision, compiled", EAGER + COMPILED)
def test_the_loss_equals_full_logits_in_float64(device, divergence, precision, compiled):
    dtype, allowed = DTYPES[precision]
    tensors = leaves(device, dtype)
    truth = exact(tensors)
    options = dict(divergence=divergence, temperature=2.0)
    found, gradients = run(fused_kd_loss, tensors, memory_budget="8MiB", compile_pointwise=compiled, **options)
    right, right_gradients = run(reference_kd_loss, truth, **options)
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-4)
    for ours, best in zip(gradients, right_gradients, strict=True):
        assert relative(ours, best) < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_products_come_out_in_float32(device, dtype):
    """Where this fails the loss is still right, but slower: operands are then converted tile by tile."""
    tensor = torch.ones(8, 8, device=device, dtype=dtype)
    precision = choose_precision(tensor, tensor, torch.float32)
    if device.type == "cuda":
        assert precision.operand is dtype
    assert precision.result is torch.float32
    assert isinstance(needs_sum_buffer(device, precision), bool)


def test_gradients_stay_exact_as_the_student_nears_the_teacher(device):
    """Logits rounded to bf16 would leave an error of a fifth here."""
    hidden, weight, *_, labels = leaves(device, torch.bfloat16)
    noise = torch.randn(hidden.shape, generator=torch.Generator(device).manual_seed(5), device=device)
    near = (hidden.detach().float() + 0.04 * noise).bfloat16().requires_grad_()
    tensors = [near, weight, hidden.detach(), weight.detach().clone(), None]
    truth = exact(tensors[:4])
    fused_kd_loss(near, Head(weight), tensors[2], Head(tensors[3])).loss.backward()
    reference_kd_loss(truth[0], Head(truth[1]), truth[2], Head(truth[3])).loss.backward()
    assert relative(weight.grad, truth[1].grad) < BF16_ERROR


@pytest.mark.parametrize("budget", [2**22, 2**25])
def test_scratch_stays_within_the_budget(device, budget):
    tensors = leaves(device, torch.bfloat16, rows=512, vocabulary=8192)
    options = dict(memory_budget=budget, compile_pointwise=False)
    run(fused_kd_loss, tensors, **options)  # probes of the device are made once
    for tensor in tensors[:2]:
        tensor.grad = None
    held = []

    def forward():
        hidden, weight, teacher_hidden, teacher_weight, labels = tensors
        held.append(fused_kd_loss(hidden, Head(weight), teacher_hidden, Head(teacher_weight), labels, **options))

    peak = peak_extra_bytes(forward, device)
    hidden, weight = tensors[:2]
    gradients = hidden.numel() * hidden.element_size() + weight.numel() * 4
    # The allocator of CUDA gives whole blocks of 512 bytes, and the product's library keeps a workspace of its own.
    assert peak - gradients <= budget + (40 * 2**20 if device.type == "cuda" else 0)


def test_different_vocabularies(device):
    tensors = leaves(device, torch.bfloat16)
    tensors[3] = leaves(device, torch.bfloat16, vocabulary=5300, seed=1)[3]
    truth = exact(tensors)
    found, gradients = run(fused_kd_loss, tensors)
    right, right_gradients = run(reference_kd_loss, truth)
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-4)
    assert relative(gradients[1], right_gradients[1]) < BF16_ERROR


def test_a_frozen_head_and_evaluation(device):
    hidden, weight, teacher_hidden, teacher_weight, labels = leaves(device, torch.bfloat16)
    frozen = weight.detach()
    loss = fused_kd_loss(hidden, Head(frozen), teacher_hidden, Head(teacher_weight), labels).loss
    loss.backward()
    with torch.no_grad():
        again = fused_kd_loss(hidden, Head(frozen), teacher_hidden, Head(teacher_weight), labels).loss
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    assert hidden.grad.abs().sum() > 0
