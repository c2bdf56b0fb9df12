"""How many of a limited number of GPUs teach and how many learn: every layout that the teacher allows, with
checkpointing and micro-batch searched together with the split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from disaggkd_cli.layouts import PARALLELISMS
from disaggkd_cli.planner.cost import Cost, comparable, cost_of
from disaggkd_cli.planner.fit import fits, usable
from disaggkd_cli.planner.memory import teacher_rank
from disaggkd_cli.planner.timing import (
    Timing,
    disaggregated_timing,
    recommended_ring_depth,
    servers,
    student_time,
    teacher_time,
)
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.planner.writing import WRITING

MODE = "disaggregated_fused"
LARGEST_REPLICA = 64
_FAST_ENOUGH = 0.9
"""A split is not taken for its price when it has less than this share of the fastest one's speed."""


@dataclass(frozen=True)
class Split:
    """One way to divide the GPUs. `rounding_loss`: throughput lost against a split into fractions of GPUs."""

    student_ranks: int
    replicas: int
    ranks_per_replica: int
    parallelism: str
    checkpointing: bool
    micro_batch_sequences: float
    accumulation: int
    ring_depth: int
    tokens_per_second: float
    bottleneck: str
    rounding_loss: float
    cost_per_hour: float | None

    @property
    def teacher_ranks(self) -> int:
        return self.replicas * self.ranks_per_replica

    @property
    def gpus(self) -> int:
        return self.student_ranks + self.teacher_ranks


def ideal_ratio(work: Workload) -> float:
    """Teacher GPUs per student GPU at which neither waits."""
    if work.cached:
        return 0.0
    timing = disaggregated_timing(work)
    per_teacher = timing.rates["teacher"] / work.teacher_ranks
    rate = timing.rates["student"]
    if timing.writing:
        rate = 1 / (1 / rate + 1 / timing.rates[WRITING])
    per_student = rate / work.student_ranks
    return per_student / per_teacher


def smallest_replica(work: Workload) -> int | None:
    """Ranks of the smallest replica of the config's layout that fits, or None when none up to 64 ranks does."""
    sizes = range(1, LARGEST_REPLICA + 1)
    return next((size for size in sizes if _teacher_fits(work.with_(ranks_per_replica=size))), None)


def splits(work: Workload, gpus: int) -> list[Split]:
    """The best fitting splits of at most `gpus` GPUs, one for each layout of the teacher, best first.

    A student rank's share of a step stays what the config says, sequences times accumulation: more accumulation pays
    for a smaller micro-batch. The global batch changes with the student's ranks.
    """
    if work.cached or gpus < 2:
        return []
    found: dict[tuple[str, int], list[Workload]] = {}
    for changed in batches(work):
        for laid_out in _layouts(changed, gpus - 1):
            key = (laid_out.parallelism if laid_out.ranks_per_replica > 1 else "", laid_out.ranks_per_replica)
            for counted in _counts(laid_out, gpus):
                found.setdefault(key, []).append(counted)
    best = [one for one in (_best(works) for works in found.values()) if one is not None]
    return [_split(work, timing, gpus) for work, timing in _ranked(best)]


def as_workload(work: Workload, split: Split) -> Workload:
    """`work` divided as `split` says."""
    return work.with_(
        student_ranks=split.student_ranks,
        replicas=split.replicas,
        ranks_per_replica=split.ranks_per_replica,
        parallelism=split.parallelism,
        replicate=replicas_that_divide(work, split.student_ranks),
        checkpointing=split.checkpointing,
        micro_batch_tokens=round(split.micro_batch_sequences * work.sequence),
        accumulation=split.accumulation,
        ring_depth=split.ring_depth,
    )


def replicas_that_divide(work: Workload, student_ranks: int) -> int:
    """`student.replicate` where it divides the ranks, else 1."""
    return work.replicate if student_ranks % work.replicate == 0 else 1


def batches(work: Workload) -> Iterator[Workload]:
    """With and without checkpointing, every micro-batch that divides a rank's sequences of a step."""
    sequences = work.micro_batch_tokens // work.sequence
    whole = sequences * work.sequence == work.micro_batch_tokens and sequences > 0
    total = sequences * work.accumulation
    sizes = [size for size in range(1, total + 1) if total % size == 0] if whole else []
    for checkpointing in (False, True):
        if not whole:
            yield work.with_(checkpointing=checkpointing)
        for size in sizes:
            yield work.with_(
                checkpointing=checkpointing, micro_batch_tokens=size * work.sequence, accumulation=total // size
            )


def _layouts(work: Workload, most: int) -> Iterator[Workload]:
    """Every layout of a replica of up to `most` ranks that the teacher allows and that fits, the best of each
    parallelism by what a GPU of it gives, and the smallest."""
    one = work.with_(ranks_per_replica=1)
    if _teacher_fits(one):
        yield one
    for parallelism in PARALLELISMS:
        fitting = []
        for ranks in range(2, min(LARGEST_REPLICA, most) + 1):
            laid_out = work.with_(ranks_per_replica=ranks, parallelism=parallelism)
            if laid_out.refused is None and _teacher_fits(laid_out):
                fitting.append((_per_gpu(laid_out), -ranks, laid_out))
        if fitting:
            fastest = max(fitting, key=lambda entry: entry[:2])[2]
            smallest = fitting[0][2]
            yield fastest
            if smallest.ranks_per_replica != fastest.ranks_per_replica:
                yield smallest


def _per_gpu(work: Workload) -> float:
    """Tokens per second of one teacher GPU of a layout."""
    one = work.with_(replicas=1)
    return servers(one) * one.micro_batch_tokens / teacher_time(one).value / one.ranks_per_replica


def _counts(work: Workload, gpus: int) -> Iterator[Workload]:
    """Numbers of replicas and student ranks near the balance of the two, which is where the fastest split lies: with
    more replicas the student gets slower, with fewer the teachers do."""
    size = work.ranks_per_replica
    most = (gpus - 1) // size
    if most < 1:
        return
    teacher = _per_gpu(work) * size
    at = min(most, max(1, gpus // (2 * size)))
    for _ in range(3):
        # A student rank's speed depends a little on how many there are.
        student = work.micro_batch_tokens / student_time(_counted(work, gpus - at * size, at)).value
        at = min(most, max(1, round(gpus * student / (teacher + size * student))))
    seen = set()
    for replicas in {max(1, min(most, at + step)) for step in (-2, -1, 0, 1, 2)} | {most, 1}:
        students = gpus - replicas * size
        # No more student ranks than the teachers feed, with a tenth to spare against jitter.
        needed = min(students, math.ceil(1.1 * replicas * teacher / student))
        for count in {students, max(1, needed)}:
            if (count, replicas) not in seen:
                seen.add((count, replicas))
                yield _counted(work, count, replicas)


def _counted(work: Workload, students: int, replicas: int) -> Workload:
    return work.with_(student_ranks=students, replicas=replicas, replicate=replicas_that_divide(work, students))


_Timed = tuple[Workload, Timing]


def _best(works: list[Workload]) -> _Timed | None:
    """The best of one layout that fits, in order of speed until enough do."""
    timed = sorted(((work, disaggregated_timing(work)) for work in works), key=lambda one: -one[1].tokens_per_second)
    fitting: list[_Timed] = []
    for work, timing in timed:
        if fitting and timing.tokens_per_second < _FAST_ENOUGH * fitting[0][1].tokens_per_second:
            break
        deeper = work.with_(ring_depth=max(work.ring_depth, recommended_ring_depth(work)))
        if fits(deeper, MODE):
            fitting.append((deeper, disaggregated_timing(deeper)))
    return _ranked(fitting)[0] if fitting else None


def _ranked(timed: list[_Timed]) -> list[_Timed]:
    """Best first. Where prices are known: most tokens for the money among those that are fast enough; else the fastest,
    and of equally fast ones that with fewest GPUs."""
    if not timed:
        return []
    costs = [cost_of(work, MODE, timing.tokens_per_second) for work, timing in timed]
    fastest = max(one.tokens_per_second for one in costs)
    priced = all(one.per_hour for one in costs)
    worth = comparable(costs)

    def order(index: int) -> tuple[float, float, float]:
        speed = costs[index].tokens_per_second
        if priced:
            return (-float(speed >= _FAST_ENOUGH * fastest), -worth[index], costs[index].gpus)
        return (0.0, -round(speed / fastest, 2), costs[index].gpus)

    return [timed[index] for index in sorted(range(len(timed)), key=order)]


def _split(work: Workload, timing: Timing, gpus: int) -> Split:
    cost: Cost = cost_of(work, MODE, timing.tokens_per_second)
    per_teacher = timing.rates["teacher"] / work.teacher_ranks
    per_student = timing.rates["student"] / work.student_ranks
    ideal = gpus / (1 / per_teacher + 1 / per_student)
    return Split(
        student_ranks=work.student_ranks,
        replicas=work.replicas,
        ranks_per_replica=work.ranks_per_replica,
        parallelism=work.parallelism,
        checkpointing=work.checkpointing,
        micro_batch_sequences=work.micro_batch_tokens / work.sequence,
        accumulation=work.accumulation,
        ring_depth=work.ring_depth,
        tokens_per_second=timing.tokens_per_second,
        bottleneck=timing.bottleneck,
        rounding_loss=max(0.0, 1 - timing.tokens_per_second / ideal),
        cost_per_hour=cost.per_hour,
    )


def _teacher_fits(work: Workload) -> bool:
    return work.refused is None and teacher_rank(work).peak_bytes <= usable(work, "teacher").value
