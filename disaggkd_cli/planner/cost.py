"""What a mode takes and costs: GPUs, GPU-hours, money."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.workload import Workload


@dataclass(frozen=True)
class Cost:
    """Of a mode's GPUs together. `per_hour` is None where a price is not known; it has the currency of the prices."""

    student_gpus: int
    teacher_gpus: int
    per_hour: float | None
    tokens_per_second: float

    @property
    def gpus(self) -> int:
        return self.student_gpus + self.teacher_gpus

    def hours(self, tokens: float) -> float:
        """Hours that `tokens` take."""
        return tokens / self.tokens_per_second / 3600

    def gpu_hours(self, tokens: float) -> float:
        """GPU-hours that `tokens` take."""
        return self.hours(tokens) * self.gpus

    def money(self, tokens: float) -> float | None:
        """What `tokens` cost, or None where a price is not known."""
        return None if self.per_hour is None else self.hours(tokens) * self.per_hour


def gpus_of(work: Workload, mode: str) -> int:
    """GPUs that a mode takes."""
    return work.student_ranks + (work.teacher_ranks if mode == "disaggregated_fused" else 0)


def cost_of(work: Workload, mode: str, tokens_per_second: float) -> Cost:
    """The cost of a mode that runs at `tokens_per_second`."""
    teachers = work.teacher_ranks if mode == "disaggregated_fused" else 0
    cluster = work.cluster
    known = cluster.student_price is not None and (cluster.teacher_price is not None or not teachers)
    per_hour = work.student_ranks * cluster.student_price + teachers * (cluster.teacher_price or 0) if known else None
    return Cost(work.student_ranks, teachers, per_hour, tokens_per_second)


def comparable(costs: list[Cost]) -> list[float]:
    """How much each gives for what it takes: tokens per money where the price of each is known and above zero, else
    tokens per GPU-second. More is better; only ratios mean something."""
    if all(one.per_hour for one in costs):
        return [one.tokens_per_second / one.per_hour for one in costs]
    return [one.tokens_per_second / one.gpus for one in costs]
