"""What links and collectives give, by where the ranks sit: NVLink or PCIe inside a node, NICs between nodes.

Ranks fill nodes in their order. All rates are GB/s of one rank, one direction.
"""

from __future__ import annotations

from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.hardware import Gpu
from disaggkd_cli.planner.workload import Cluster, Workload

_NO_LINK = 1e-9
"""GB/s of a link that does not exist; a layout that needs it does not fit (see `out_of_reach`)."""


def inside_rate(gpu: Gpu) -> float:
    """Between the GPUs of one node: NVLink where there is one, else PCIe."""
    return gpu.nvlink_gb_per_s * constant("nvlink_efficiency") or gpu.pcie_gb_per_s * constant("pcie_efficiency")


def collective_rate(cluster: Cluster, ranks: int, gpu: Gpu) -> float:
    """In a large collective of consecutive ranks: across nodes all NICs of a node carry it."""
    if ranks <= cluster.gpus_per_node:
        return inside_rate(gpu)
    node = cluster.gpus_per_node * constant("nic_efficiency") * cluster.nic_gb_per_s
    return max(min(inside_rate(gpu), node), _NO_LINK)


def replicas_rate(cluster: Cluster, shard_ranks: int, replicate: int, gpu: Gpu) -> float:
    """In the all-reduce of one shard over the replicas of a student (HSDP), whose ranks lie `shard_ranks` apart.

    A node's NICs carry the all-reduces of the shards that lie in it: as many as it has GPUs, or fewer where several
    replicas share the node.
    """
    if shard_ranks * replicate <= cluster.gpus_per_node:
        return inside_rate(gpu)
    rings = min(shard_ranks, cluster.gpus_per_node)
    nics = cluster.gpus_per_node * constant("nic_efficiency") * cluster.nic_gb_per_s
    return max(min(inside_rate(gpu), nics / rings), _NO_LINK)


def stage_rate(cluster: Cluster, stages: int, gpu: Gpu) -> float:
    """From one stage of a pipeline to the next, at its slowest place."""
    if stages <= cluster.gpus_per_node:
        return inside_rate(gpu)
    return max(min(inside_rate(gpu), cluster.nic_gb_per_s * constant("point_to_point_efficiency")), _NO_LINK)


def link_rate(work: Workload) -> float:
    """Of all links of one rank between teacher and student together."""
    cluster = work.cluster
    if on_one_node(work):
        return min(inside_rate(cluster.student_gpu), inside_rate(cluster.teacher_gpu))
    return max(cluster.nic_gb_per_s * constant("point_to_point_efficiency"), _NO_LINK)


def on_one_node(work: Workload) -> bool:
    """Whether student and teachers share one node. GPUs of two kinds sit in two, unless there is no network."""
    cluster = work.cluster
    alike = cluster.student_gpu.name == cluster.teacher_gpu.name or not cluster.nic_gb_per_s
    return alike and work.student_ranks + work.teacher_ranks <= cluster.gpus_per_node


def out_of_reach(work: Workload, gpus: int) -> str | None:
    """Why `gpus` GPUs cannot work together, or None: without a network all must be in one node."""
    cluster = work.cluster
    if cluster.nic_gb_per_s or gpus <= cluster.gpus_per_node:
        return None
    return (
        f"{gpus} GPUs need more than one node of {cluster.gpus_per_node}, and hardware.nic_gbps=0 says that there is "
        "no network"
    )
