"""A discrete-event simulation of teachers, student ranks and rings, with jitter, slow nodes and failures.

Student ranks work in step (FSDP's collectives hold them together), so a step has one time, that of the slowest. Each
keeps `ring_depth` slots; a request goes out when a slot is free, the teacher that is free first answers it, and the
slot
is freed when the micro-batch that used it is done.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from rich.table import Table

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.plan import Plan
from disaggkd_cli.planner.timing import disaggregated_timing, servers
from disaggkd_cli.planner.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """What is wrong with the teachers: a share of them slow by a factor, failures per teacher and hour, seconds to
    come back."""

    name: str
    slow_share: float = 0.0
    slow_factor: float = 1.0
    failures_per_hour: float = 0.0
    recovery_seconds: float = 120.0


@dataclass(frozen=True)
class Simulated:
    """What came of it. `requests_resent` are those that a failing teacher held."""

    scenario: str
    tokens_per_second: float
    stall_share: float
    idle_share: float
    failures: int
    requests_resent: int


SCENARIOS = (
    Scenario("as planned"),
    Scenario("at half speed: one teacher in ten, or one", slow_share=0.1, slow_factor=2.0),
    Scenario("each teacher fails once in two hours", failures_per_hour=0.5),
)


def simulate(
    student_ranks: int,
    teachers: int,
    ring_depth: int,
    student_seconds: float,
    teacher_seconds: float,
    *,
    transfer_seconds: float = 0.0,
    jitter: float = 0.0,
    steps: int = 400,
    seed: int = 0,
    scenario: Scenario = SCENARIOS[0],
    tokens: int = 1,
) -> Simulated:
    """Simulate `steps` micro-batches of all ranks.

    Args:
        teachers: servers that each answer one request at a time, in `teacher_seconds` on average.
        jitter: coefficient of variation of all times (log-normal).
        tokens: of one micro-batch of one rank.
    """
    draw = random.Random(seed)
    pool = _Teachers(teachers, teacher_seconds, jitter, scenario, draw)
    ready: list[list[float]] = [[] for _ in range(student_ranks)]
    now = stalled = busy = 0.0
    for _ in range(ring_depth):
        for rank in range(student_ranks):
            ready[rank].append(pool.answer(0.0) + transfer_seconds)
    warm_up, started = steps // 10, 0.0
    for step in range(steps):
        if step == warm_up:
            started, stalled, busy = now, 0.0, 0.0
            pool.working = 0.0
        arrived = max(queue[0] for queue in ready)
        stalled += max(0.0, arrived - now)
        begin = max(now, arrived)
        seconds = _lognormal(draw, student_seconds, jitter)
        now = begin + seconds
        busy += seconds
        for queue in ready:
            queue.pop(0)
            queue.append(pool.answer(now) + transfer_seconds)
    elapsed = now - started
    done = (steps - warm_up) * student_ranks * tokens
    idle = max(0.0, 1 - pool.working / (teachers * elapsed))
    return Simulated(scenario.name, done / elapsed, stalled / elapsed, idle, pool.failures, pool.resent)


class _Teachers:
    """Teachers as a heap of the times at which they are free. A failing one loses its request, which another takes
    over."""

    def __init__(self, count: int, seconds: float, jitter: float, scenario: Scenario, draw: random.Random) -> None:
        slow = slow_teachers(count, scenario)
        self._free = [(0.0, number) for number in range(count)]
        self._factor = [scenario.slow_factor if number < slow else 1.0 for number in range(count)]
        self._seconds, self._jitter, self._scenario, self._draw = seconds, jitter, scenario, draw
        self.working, self.failures, self.resent = 0.0, 0, 0

    def answer(self, asked: float) -> float:
        """When the answer to a request sent at `asked` is ready."""
        while True:
            free, number = heapq.heappop(self._free)
            begin = max(free, asked)
            seconds = _lognormal(self._draw, self._seconds * self._factor[number], self._jitter)
            rate = self._scenario.failures_per_hour / 3600
            failed_after = self._draw.expovariate(rate) if rate else math.inf
            if failed_after >= seconds:
                self.working += seconds
                heapq.heappush(self._free, (begin + seconds, number))
                return begin + seconds
            self.failures += 1
            self.resent += 1
            asked = begin + failed_after
            heapq.heappush(self._free, (asked + self._scenario.recovery_seconds, number))


def slow_teachers(count: int, scenario: Scenario) -> int:
    """How many of the teachers are slow: their share, but one at least where there is to be any."""
    return max(1, round(count * scenario.slow_share)) if scenario.slow_share else 0


def _lognormal(draw: random.Random, mean: float, jitter: float) -> float:
    if jitter <= 0:
        return mean
    variance = math.log1p(jitter**2)
    return mean * draw.lognormvariate(-variance / 2, math.sqrt(variance))


def simulate_workload(work: Workload, scenario: Scenario = SCENARIOS[0], steps: int = 400) -> Simulated:
    """Simulate the disaggregated run that `work` describes."""
    timing = disaggregated_timing(work)
    return simulate(
        work.student_ranks,
        servers(work),
        work.ring_depth,
        timing.student.value,
        timing.teacher.value,
        transfer_seconds=timing.latency - timing.teacher.value,
        jitter=work.efficiency.jitter,
        steps=steps,
        scenario=scenario,
        tokens=work.micro_batch_tokens,
    )


def simulate_plan(plan: Plan) -> list[Simulated]:
    """The plan's disaggregated run under each scenario.

    Raises:
        UserError: the student writes texts.
    """
    work = plan.modes["disaggregated_fused"].work
    if work.writing is not None:
        raise UserError("--simulate: that the student writes is not simulated; leave it out, or set on_policy=null")
    return [simulate_workload(work, scenario) for scenario in SCENARIOS]


def simulation_table(plan: Plan, simulated: list[Simulated]) -> Table:
    """The simulations beside the closed form."""
    closed = plan.modes["disaggregated_fused"].timing
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="dim", title="simulated, disaggregated", title_justify="left"
    )
    for name in ("", "speed", "student stalls", "teachers idle", "failures"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(
        "closed form",
        f"{closed.tokens_per_second:,.0f} tok/s",
        f"{closed.stall_share:.1%}",
        f"{closed.idle_share:.1%}",
        "",
    )
    for one in simulated:
        row = (
            one.scenario,
            f"{one.tokens_per_second:,.0f} tok/s",
            f"{one.stall_share:.1%}",
            f"{one.idle_share:.1%}",
            str(one.failures),
        )
        table.add_row(*row)
    return table
