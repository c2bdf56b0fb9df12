"""Small models and workloads whose figures can be worked by hand."""

from __future__ import annotations

from disaggkd_cli.planner.hardware import Gpu
from disaggkd_cli.planner.models.shapes import DenseMLP, GroupedQueryAttention, LayerShape, ModelShape
from disaggkd_cli.planner.workload import Cluster, Efficiency, Workload

GPU = Gpu(
    "toy", memory_gib=80, bf16_tflops=1000, matmul_tflops=800, hbm_tb_per_s=3, nvlink_gb_per_s=450, pcie_gb_per_s=64
)


def toy_model(
    layers: int = 2, hidden: int = 8, vocabulary: int = 32, *, tied: bool = False, name: str = "toy"
) -> ModelShape:
    """q = 8, kv = 4, f = 16: a layer has 192 + 384 + 16 = 592 parameters at hidden 8."""
    layer = LayerShape(GroupedQueryAttention(heads=2, kv_heads=1, head_dim=4), DenseMLP(16))
    return ModelShape(name, "llama", hidden, vocabulary, tied, (layer,) * layers, "made up")


def toy_work(**changes: object) -> Workload:
    """A workload of two toy models; change what the test is about."""
    defaults = {
        "teacher": toy_model(3, hidden=16, name="teacher"),
        "student": toy_model(2, name="student"),
        "cluster": Cluster(GPU, GPU, gpus_per_node=8, nic_gb_per_s=50.0),
        "efficiency": Efficiency(),
        "student_ranks": 4,
        "micro_batch_tokens": 64,
        "sequence": 32,
    }
    return Workload(**{**defaults, **changes})
