"""How many of a given number of GPUs teach and how many learn, and how many teacher ranks a student keeps busy."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.fit import fits, usable
from disaggkd_cli.planner.memory import student_rank, teacher_rank
from disaggkd_cli.planner.timing import Timing, disaggregated_timing, recommended_ring_depth
from disaggkd_cli.planner.workload import Workload

_REPLICA_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Split:
    """One way to divide the GPUs. `rounding_loss`: throughput lost against a split into fractions of GPUs."""

    student_ranks: int
    replicas: int
    ranks_per_replica: int
    tokens_per_second: float
    bottleneck: str
    rounding_loss: float


def ideal_ratio(work: Workload) -> float:
    """Teacher GPUs per student GPU at which neither waits."""
    if work.cached:
        return 0.0
    timing = disaggregated_timing(work)
    per_teacher = timing.rates["teacher"] / work.teacher_ranks
    per_student = timing.rates["student"] / work.student_ranks
    return per_student / per_teacher


def smallest_replica(work: Workload) -> int | None:
    """Ranks of the smallest teacher replica that fits, or None when none up to 64 ranks does."""
    for size in _REPLICA_SIZES:
        if _teacher_fits(work.with_(ranks_per_replica=size)):
            return size
    return None


def splits(work: Workload, gpus: int) -> list[Split]:
    """The fitting splits of `gpus` GPUs, best first. The global batch changes with the student's ranks; the micro-
    batch stays."""
    smallest = None if work.cached else smallest_replica(work)
    if smallest is None or gpus <= smallest:
        return []
    found: list[Split] = []
    ideal = None
    for replicas in range(1, gpus // smallest + 1):
        students = gpus - replicas * smallest
        if students < 1:
            break
        changed = work.with_(
            student_ranks=students,
            replicas=replicas,
            ranks_per_replica=smallest,
            replicate=work.replicate if students % work.replicate == 0 else 1,
        )
        if not fits(changed, "disaggregated_fused"):
            continue
        changed = changed.with_(ring_depth=max(work.ring_depth, recommended_ring_depth(changed)))
        if not fits(changed, "disaggregated_fused"):
            continue
        timing = disaggregated_timing(changed)
        if ideal is None:
            ideal = _ideal_rate(changed, timing, gpus)
        found.append(
            Split(
                students,
                replicas,
                smallest,
                timing.tokens_per_second,
                timing.bottleneck,
                max(0.0, 1 - timing.tokens_per_second / ideal),
            )
        )
    return sorted(found, key=lambda split: -split.tokens_per_second)


def _ideal_rate(work: Workload, timing: Timing, gpus: int) -> float:
    per_teacher = timing.rates["teacher"] / work.teacher_ranks
    per_student = timing.rates["student"] / work.student_ranks
    return gpus / (1 / per_teacher + 1 / per_student)


def _teacher_fits(work: Workload) -> bool:
    return work.refused is None and teacher_rank(work).peak_bytes <= usable(work, "teacher").value


def student_fits(work: Workload) -> bool:
    """Whether the student rank alone fits."""
    return student_rank(work).peak_bytes <= usable(work, "student").value
