"""Window and shard sizes that the cost model chooses for GPUs. The rates are stated, not measured here."""

from __future__ import annotations

import random

import pytest
import torch

from disaggkd_cli.losses.device_costs import DEVICES, GpuModel, TileWork, device_key
from disaggkd_cli.losses.matmul import choose_precision, cost_model, needs_sum_buffer
from disaggkd_cli.losses.tiling import LossShape, choose_tiling

GPUS = [name for name, model in DEVICES.items() if isinstance(model, GpuModel)]


def reference_head(device: str, **changes) -> LossShape:
    sizes = dict(rows=8192, shared=248320, student_width=4096, teacher_width=2048)
    return LossShape(**{**sizes, "operand_bytes": 2, "gradient_copy_bytes": 2, "device": device, **changes})


@pytest.mark.parametrize(
    "name, capability, key",
    [
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA GH200 480GB", (9, 0), "H200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100"),
        ("NVIDIA B200", (10, 0), "H100"),
        ("NVIDIA A10G", (8, 6), "A100"),
        ("Tesla V100-SXM2-16GB", (7, 0), "A100"),
    ],
)
def test_a_gpu_takes_the_model_of_its_generation(name, capability, key):
    assert device_key(name, capability) == key


@pytest.mark.parametrize("device", GPUS)
def test_more_memory_never_makes_the_reference_head_slower(device):
    budgets = [2**exponent for exponent in range(26, 34)]
    tilings = [choose_tiling(reference_head(device), budget) for budget in budgets]
    assert all(tiling.scratch_bytes <= budget for tiling, budget in zip(tilings, budgets, strict=True))
    for less, more in zip(tilings, tilings[1:], strict=False):
        assert more.seconds <= less.seconds * 1.05
    floor = 2 * 8192 * 248320 * (3 * 4096 + 2048) / DEVICES[device].flops
    assert floor <= tilings[-1].seconds <= 1.4 * floor
    assert tilings[4].window >= 512, "at 1 GiB a window's products are bound by arithmetic"


@pytest.mark.parametrize("device", GPUS)
def test_losses_of_any_size_find_a_tiling_within_the_budget(device, seed):
    draw = random.Random(seed)
    for _ in range(40):
        shape = LossShape(
            rows=draw.choice([1, 7, 100, 2048, 8192]), shared=draw.choice([33, 700, 32768, 151936]),
            student_width=draw.choice([16, 256, 4096]), teacher_width=draw.choice([24, 192, 5120]),
            student_extra=draw.choice([0, 5]), teacher_extra=draw.choice([0, 300]),
            further_passes=draw.choice([0, 1, 2]),
            operand_bytes=draw.choice([2, 4]), gradient_copy_bytes=draw.choice([0, 2]),
            compiled=draw.random() < 0.5, weight_copy=draw.random() < 0.5, gradients=draw.random() < 0.8, device=device,
        )  # fmt: skip
        for budget in (2**26, 2**30):
            tiling = choose_tiling(shape, budget)
            assert tiling.scratch_bytes <= budget
            assert 0 < tiling.seconds < float("inf")


@pytest.mark.parametrize("device", GPUS)
def test_windows_keep_the_sums_of_the_heads_gradient_off_the_critical_path(device):
    """Reading and writing dW for a window of few rows takes longer than its product; for one of many it does not."""
    model = DEVICES[device]

    def seconds_per_row(window: int) -> float:
        work = TileWork(window, 16384, 4096, 2048, 1, 1, True, True, 2, 2, 4, False)
        return model.seconds(work) / window

    assert seconds_per_row(128) > 1.5 * seconds_per_row(4096)
    assert seconds_per_row(2048) < 1.1 * seconds_per_row(4096)


def test_a_product_takes_its_arithmetic_or_its_traffic_whichever_is_longer():
    gpu = GpuModel(flops=1e14, bytes_per_second=1e12, processors=100)
    only_student = dict(hidden_gradient=False, weight_gradient=False, passes=0, operand_bytes=2, result_bytes=4)
    # 12,800 x 1,280 results are 1,000 tiles, ten full rounds: the arithmetic is that of the product itself.
    wide = TileWork(12800, 1280, 4096, 0, 1, 0, weight_copy=False, **only_student)
    assert gpu.seconds(wide) == pytest.approx(2 * 12800 * 1280 * 4096 / 1e14)
    # 1,000 rows by 128: eight tiles of a hundred processors; reading 128 columns of the head takes no time beside it.
    thin = TileWork(128, 128 * 100, 16, 0, 1, 0, weight_copy=False, **only_student)
    assert gpu.seconds(thin) == pytest.approx((2 * (128 + 12800) * 16 + 4 * 128 * 12800) / 1e12)


def test_a_gpu_that_cannot_add_in_the_product_is_charged_for_the_buffer():
    with_buffer = choose_tiling(reference_head("H200", weight_copy=True), 2**30)
    without = choose_tiling(reference_head("H200"), 2**30)
    assert without.seconds < with_buffer.seconds


def test_the_cpu_needs_no_buffer_and_has_its_own_model():
    cpu = torch.device("cpu")
    hidden, weight = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)
    assert cost_model(cpu) == "cpu"
    assert not needs_sum_buffer(cpu, choose_precision(hidden, weight, torch.float32))
