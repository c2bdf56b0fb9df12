"""Published training rates of other trainers, and the closed form for each: what times are fitted to and judged by.

Rows of a source alternate between the fit and the held-out half, in the order of the source. Sources:

* llm-foundry: mosaicml/llm-foundry@061f2c7 scripts/train/benchmarking/README.md, the bf16 tables of 760M to 70B on
  H100-80 and A100-80: FSDP, MPT (no gated MLP), flash attention.
* torchtitan-a100: pytorch/torchtitan@0413364 docs/performance.md, 64 A100.
* torchtitan-h100: pytorch/torchtitan@31a17bf benchmarks/llama3_h100_202412_torchtitan.md, H100 of 96 GB at 500 W with
  2.4 TB/s; by its own words its peak lies between SXM and NVL, so the middle is taken. The long sequences run with
  context parallelism, a share of a sequence on each rank.
* fms-fsdp: foundation-model-stack/fms-fsdp@0d31998 README.md, 128 A100, Llama 2 at 4,096 tokens; HSDP in 7B and 13B.
* kempner-h200: KempnerInstitute/KempnerForge@9f3f03a benchmarks/mfu_scaling, nodes of four H200; FSDP rows only.
* halo-b300: whitecircle/halo human-docs/performance.md, B300 counted as B200; optimizer states in bfloat16.
* megatron-bridge: NVIDIA-NeMo/Megatron-Bridge@00b7660 docs/performance-summary.md, bf16 rows of 25.11; expert and
  pipeline parallelism, whose collectives and bubbles are not modelled here.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from disaggkd_cli.config.attention import FLASH
from disaggkd_cli.planner.compute import compute_seconds
from disaggkd_cli.planner.constants import FUSED_LOGIT_TRAFFIC, constant
from disaggkd_cli.planner.efficiency import KERNELS, Kernels
from disaggkd_cli.planner.flops import ForwardWork, forward_work
from disaggkd_cli.planner.hardware import Gpu, load_catalogue
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.shapes import DenseMLP, GroupedQueryAttention, LayerShape, ModelShape
from disaggkd_cli.planner.network import collective_rate, replicas_rate
from disaggkd_cli.planner.workload import Cluster

_MPT = {
    "760m": (1536, 24),
    "1b": (2048, 24),
    "3b": (2560, 32),
    "7b": (4096, 32),
    "13b": (5120, 40),
    "30b": (7168, 48),
    "70b": (8192, 80),
}
"""Hidden size and layers."""
_MPT_VOCABULARY, _MPT_SAVED = 50_368, 34
"""Ids, and bytes a layer saves for each element of the hidden size: no gate, GELU, four times as wide."""
_LLAMA = {
    "llama-2-7b": (4096, 32, 32, 32, 11_008, 32_000),
    "llama-2-13b": (5120, 40, 40, 40, 13_824, 32_000),
    "llama-2-34b": (8192, 48, 64, 8, 22_016, 32_000),
    "llama-2-70b": (8192, 80, 64, 8, 28_672, 32_000),
    "llama-13b-gqa": (5120, 40, 40, 8, 17_920, 128_256),
}
"""Hidden size, layers, heads, key/value heads, MLP width, ids."""


@dataclass(frozen=True)
class PublishedRate:
    """One published run; its rate is in tokens per second and GPU.

    Attributes:
        sequences: of one micro-batch of a rank.
        recomputed: share of the forward that is done twice.
        kernels: eager, compiled, or float8 (compiled, with float8 matrix products).
    """

    source: str
    model: str
    gpu: str
    sequence: int
    gpus: int
    shard_ranks: int
    sequences: float
    accumulation: int
    recomputed: float
    kernels: str
    tokens_per_second: float
    held_out: bool

    @property
    def sparse(self) -> bool:
        """Whether it has routed experts."""
        return self.model in ("gpt-oss-20b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3", "qwen3.5-35b-a3b")

    @property
    def name(self) -> str:
        again = {0: "", 1: ", recomputed"}.get(self.recomputed, f", {self.recomputed:.0%} recomputed")
        return (
            f"{self.model}, S {self.sequence:,}, {self.gpus} GPUs, {self.sequences:g} sequences{again}, {self.kernels}"
        )


@lru_cache(maxsize=1)
def published_rates() -> tuple[PublishedRate, ...]:
    """Every row, in order."""
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    with (Path(__file__).parent / "published_rates.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["source"], row["gpu"] if row["source"] == "llm-foundry" else "")
            whole = {name: int(row[name]) for name in ("sequence", "gpus", "shard_ranks", "accumulation")}
            real = {name: float(row[name]) for name in ("sequences", "recomputed", "tokens_per_second")}
            words = {name: row[name] for name in ("source", "model", "gpu", "kernels")}
            rows.append(PublishedRate(**words, **whole, **real, held_out=seen[key] % 2 == 1))
            seen[key] += 1
    return tuple(rows)


def predict_rate(row: PublishedRate, kernels: Kernels = KERNELS) -> float:
    """The closed form of one row, in tokens per second and GPU."""
    gpu, cluster = _cluster(row)
    forward, parameters, width, vocabulary = _model(row.model, row.sequence)
    tokens = row.sequences * row.sequence
    compute = (
        tokens
        * compute_seconds(
            row.name,
            gpu,
            forward,
            sequence=row.sequence,
            passes=3 + row.recomputed,
            recomputed=row.recomputed >= 0.5,
            head=6.0 * vocabulary * width,
            logits=FUSED_LOGIT_TRAFFIC * vocabulary,
            compiled=row.kernels != "eager",
            float8=row.kernels == "float8",
            kernels=kernels,
        ).value
    )
    shards, copies = row.shard_ranks, row.gpus // row.shard_ranks
    collectives = 6 * parameters * (shards - 1) / shards / (collective_rate(cluster, shards, gpu) * 1e9)
    if shards > 1 and copies > 1:
        reduced = 2 * 2 * parameters / shards * (copies - 1) / copies
        collectives += reduced / (replicas_rate(cluster, shards, copies, gpu) * 1e9)
    memory = gpu.hbm_tb_per_s * 1e12 * constant("hbm_efficiency")
    optimizer = 28 * parameters / max(shards, row.gpus if shards == 1 else 1) / memory / row.accumulation
    return tokens / (max(compute, collectives) + kernels.exposed * min(compute, collectives) + optimizer)


def _cluster(row: PublishedRate) -> tuple[Gpu, Cluster]:
    gpus = load_catalogue().gpus
    per_node, nic = 8, 50.0
    if row.gpu == "H100-96-500W":
        share = (gpus["H100-SXM"].bf16_tflops + 835) / 2 / gpus["H100-SXM"].bf16_tflops
        gpu = replace(
            gpus["H100-SXM"], name=row.gpu, hbm_tb_per_s=2.4, matmul_tflops=gpus["H100-SXM"].matmul_tflops * share
        )
    elif row.gpu == "H200-SXM-4":
        gpu, per_node = gpus["H200-SXM"], 4
    else:
        gpu = gpus[row.gpu]
    if row.gpu.startswith("A100"):
        nic = 25.0
    return gpu, Cluster(gpu, gpu, gpus_per_node=per_node, nic_gb_per_s=nic)


@lru_cache(maxsize=256)
def _model(name: str, sequence: int) -> tuple[ForwardWork, int, int, int]:
    """A forward, parameters, hidden size and ids of a row's model."""
    if name.startswith("mpt-"):
        hidden, layers = _MPT[name.removeprefix("mpt-")]
        weights = 12 * layers * hidden**2
        attention = 2.0 * layers * hidden * sequence
        forward = ForwardWork(2.0 * weights, 0.0, attention, 0.0, _MPT_SAVED * hidden * layers, 0.0)
        return forward, weights + _MPT_VOCABULARY * hidden, hidden, _MPT_VOCABULARY
    if name in _LLAMA:
        hidden, layers, heads, kv_heads, width, vocabulary = _LLAMA[name]
        layer = LayerShape(GroupedQueryAttention(heads, kv_heads, hidden // heads), DenseMLP(width))
        shape = ModelShape(name, "llama", hidden, vocabulary, False, (layer,) * layers)
    else:
        shape = resolve_model(name, name)
    # These trainers have fused attention with sinks.
    mixers = [
        replace(one.mixer, sinks=False) if getattr(one.mixer, "sinks", False) else one.mixer for one in shape.layers
    ]
    layers_without = tuple(replace(one, mixer=mixer) for one, mixer in zip(shape.layers, mixers, strict=True))
    forward = forward_work(replace(shape, layers=layers_without), sequence, FLASH)
    return forward, count_parameters(shape).total, shape.hidden, shape.vocabulary
