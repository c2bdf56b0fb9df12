"""The teacher's layouts as modes of `bench step`: one pair, its teacher on one rank, or on several in each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disaggkd_cli.config import Config
from disaggkd_cli.layouts import FSDP, PIPELINE, TENSOR
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.units import format_bytes

ONE_RANK_MODE = "teacher_one_rank"
LAYOUT_MODES = (ONE_RANK_MODE, "teacher_pipeline", "teacher_fsdp", "teacher_tensor")


def layout_overrides(config: Config, mode: str) -> list[str]:
    """Return the overrides that lay the teacher of `config` out as one of `LAYOUT_MODES`: on its own number of ranks,
    or on two where it has one."""
    ranks = 1 if mode == ONE_RANK_MODE else max(2, config.teacher.ranks_per_replica)
    return [
        "mode=disaggregated",
        "loss.implementation=fused",
        f"teacher.ranks_per_replica={ranks}",
        f"teacher.parallelism={PIPELINE if ranks == 1 else mode.removeprefix('teacher_')}",
    ]


def moved_bytes_per_token(config: Config) -> float:
    """Return how many bytes the ranks of a replica move among each other for one token of a full micro-batch.

    Pipeline: hidden states between neighbours, and those of the rows asked for from the last stage to the first. FSDP:
    each forward gathers every layer to its rank. Tensor: not counted; 0.
    """
    work, ranks = workload_of(config), config.teacher.ranks_per_replica
    if ranks == 1 or config.teacher.parallelism == TENSOR:
        return 0.0
    if config.teacher.parallelism == FSDP:
        return work.teacher_bytes * work.teacher_parameters.backbone * (ranks - 1) / work.micro_batch_tokens
    return work.teacher_bytes * work.teacher.hidden * (ranks - 1 + work.supervised)


def format_layouts(modes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines that compare the layouts among `modes`; none where there is only one of them."""
    here = {mode: one for mode, one in modes.items() if mode in LAYOUT_MODES}
    if len(here) < 2:
        return []
    first = next(iter(here.values()))
    lines = ["layouts of the teacher:  tokens/s   moved/token  peak of its fullest rank  losses"]
    for mode, one in here.items():
        peak = (one["training_bytes"] or one["peak_bytes"])["teacher"]
        moved = "not counted" if mode == "teacher_tensor" else format_bytes(one["teacher_moved_bytes_per_token"])
        apart = max(abs(a - b) for a, b in zip(one["losses"], first["losses"], strict=True))
        same = "" if one is first else "the same bits" if apart == 0 else f"{apart:.2g} apart"
        lines.append(f"{mode:20} {one['tokens_per_second']:>12,.0f} {moved:>13}  {format_bytes(peak):>24}  {same}")
    lines.append("moved/token: between the ranks of a replica, by the closed form of each layout, micro-batches full")
    return lines
