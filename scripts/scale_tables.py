"""Print the tables of docs/scale.md: one pair at 8, 64, 1,024 and 10,000 GPUs, planned, simulated and counted.

    python scripts/scale_tables.py [--config configs/qwen3.5-35b-a3b-to-9b.yaml] [--store FILE] [8 64 1024 10000]

Memory, traffic, speed and the split of the GPUs are the planner's; failures are simulated with its simulator. Links and
operations of the store are counted from the transport's own constants, and turned into time with the costs of one
operation and of one link that `scripts/measure_store.py --json FILE` has measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from disaggkd_cli.config import load  # noqa: E402
from disaggkd_cli.planner.inputs import workload_of  # noqa: E402
from disaggkd_cli.planner.memory import student_rank, teacher_rank  # noqa: E402
from disaggkd_cli.planner.simulate import Scenario, simulate_workload  # noqa: E402
from disaggkd_cli.planner.split import as_workload, splits  # noqa: E402
from disaggkd_cli.planner.timing import servers  # noqa: E402
from disaggkd_cli.planner.traffic import traffic  # noqa: E402

DISCOVERY_SECONDS, WATCH_SECONDS, HEARTBEAT_SECONDS, LOOK_SECONDS = 0.2, 0.1, 1.0, 30.0
LOOKS_PER_SECOND, SEND_BUFFERS, MOST_REPLIES = 5000, 2, 8
"""As in transport/ (discovery, server, rendezvous, neighbours, request_queue); tests/unit/scripts compares."""
HOURS_BETWEEN_FAILURES = 16384 * 54 * 24 / 419
"""Of one GPU: Llama 3's training had 419 unplanned interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783)."""


def polls_per_second(students: int, teachers: int, links: int) -> float:
    """Operations a second that the store is asked for while nothing happens; `links` as `transport.links_per_rank`."""
    chosen = students > 1 and teachers >= 2 * links
    looks = min(students * teachers / LOOK_SECONDS, LOOKS_PER_SECOND) if chosen else 0.0
    return students / DISCOVERY_SECONDS + looks + teachers * (2 / WATCH_SECONDS + 1 / HEARTBEAT_SECONDS)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def bounded(students: int, teachers: int, most: int, steps: int, *, load: float = 0.97, jitter: float = 0.1,
            depth: int = 3, lost: int = 0) -> float:  # fmt: skip
    """Speed with at most `most` links a student rank, as a share of the speed with neither jitter nor waits.

    A rank is linked to neighbouring teachers, spread evenly, and asks the one that will be free first. All ranks wait
    for the slowest in every step. Teachers are busy for `load` of the time; `lost` of them are gone, and a rank that
    has no other is never served: the speed is then 0.
    """
    draw = random.Random(1)
    spread = math.sqrt(math.log1p(jitter**2))
    seconds = load * teachers / students

    def jittered(mean: float) -> float:
        return mean * draw.lognormvariate(-(spread**2) / 2, spread)

    own = [
        [number for k in range(min(most, teachers)) if (number := (rank * teachers // students + k) % teachers) >= lost]
        for rank in range(students)
    ]
    if not all(own):
        return 0.0
    free = [0.0] * teachers
    ready: list[list[float]] = [[] for _ in range(students)]

    def ask(rank: int, now: float) -> None:
        chosen = min(own[rank], key=free.__getitem__)
        free[chosen] = max(free[chosen], now) + jittered(seconds)
        ready[rank].append(free[chosen])

    for _ in range(depth):
        for rank in range(students):
            ask(rank, 0.0)
    now, warm_up, started = 0.0, steps // 5, 0.0
    for step in range(steps):
        if step == warm_up:
            started = now
        now = max(now, max(queue.pop(0) for queue in ready)) + jittered(1.0)
        for rank in draw.sample(range(students), students):
            ask(rank, now)
    return (steps - warm_up) / (now - started)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gpus", type=int, nargs="*", default=[8, 64, 1024, 10000])
    parser.add_argument("--config", default="configs/qwen3.5-35b-a3b-to-9b.yaml")
    parser.add_argument("--store", type=Path, help="what measure_store.py --json has written")
    parser.add_argument("--steps", type=int, default=150, help="of the simulation")
    options = parser.parse_args()
    work = workload_of(load(options.config), None, None)
    planned, counted, failing = [], [], []
    measured = json.loads(options.store.read_text()) if options.store else None
    for gpus in options.gpus or [8, 64, 1024, 10000]:
        best = splits(work, gpus)[0]
        students, teachers = best.student_ranks, best.replicas
        here = as_workload(work, best)
        row_bytes = traffic(here).hidden_states.value
        payload = row_bytes * here.rows
        planned.append([
            f"{gpus:,}", f"{students:,} + {teachers:,} × {best.ranks_per_replica}", f"{best.tokens_per_second:,.0f}",
            f"{student_rank(here).peak_bytes / 2**30:.1f} GiB", f"{teacher_rank(here).peak_bytes / 2**30:.1f} GiB",
            f"{row_bytes * best.tokens_per_second / students / 1e6:.1f} MB/s",
            f"{row_bytes * best.tokens_per_second / servers(here) / 1e6:.0f} MB/s",
            f"{here.step_tokens / 1e6:.2f} M",
        ])  # fmt: skip
        of_student, of_teacher = here.links
        links, polls = students * of_student, polls_per_second(students, teachers, here.links_per_rank)
        buffers = min(SEND_BUFFERS * of_teacher, MOST_REPLIES) * payload
        line = [
            f"{gpus:,}", f"{of_student}, {of_teacher}", f"{links:,}", f"{polls:,.0f}", f"{buffers / 2**30:,.1f} GiB",
        ]  # fmt: skip
        if measured:
            operation = min(row["store_seconds_each"] for row in measured["operations"])
            linked = [row for row in measured["layouts"] if row["links"] >= 16]
            joining = min(row["store_seconds_joining"] / row["links"] for row in linked)
            line += [f"{polls * operation:,.2f}", f"{links * joining:,.1f} s"]
        counted.append(line)
        per_hour = 1 / HOURS_BETWEEN_FAILURES
        harsh = Scenario("harsh", failures_per_hour=0.5, recovery_seconds=300)
        fleet = replace(harsh, name="fleet", failures_per_hour=per_hour)
        found = {one.name: simulate_workload(here, one, options.steps) for one in (Scenario("none"), fleet, harsh)}
        failing.append([
            f"{gpus:,}", f"{24 * gpus * per_hour:.3f}", f"{24 * best.teacher_ranks * per_hour:.3f}",
            f"{found['none'].tokens_per_second:,.0f}", f"{found['fleet'].tokens_per_second:,.0f}",
            f"{found['harsh'].tokens_per_second:,.0f} ({found['harsh'].failures})",
        ])  # fmt: skip
    head = ["GPUs", "student + teachers", "tokens/s", "student peak", "teacher peak", "in, a student rank",
            "out, a sending teacher rank", "tokens a step"]  # fmt: skip
    print(table(head, planned), end="\n\n")
    head = ["GPUs", "links of a student rank, of a teacher", "links", "store operations/s at rest",
            "send buffers of one teacher"]  # fmt: skip
    print(table(head + (["store processors busy", "store time to link all"] if measured else []), counted), end="\n\n")
    head = ["GPUs", "failures a day", "of teachers", "tokens/s, none fails", "at the fleet's rate",
            "each teacher every 2 h (failures seen)"]  # fmt: skip
    print(table(head, failing), end="\n\n")
    rows = []
    for students, teachers in ((56, 8), (905, 119)):
        for lost in (0, 1):
            share = [bounded(students, teachers, most, options.steps, lost=lost) for most in (1, 2, 4, 8, teachers)]
            rows.append([f"{students} + {teachers}, {lost} lost", *(f"{value:.3f}" for value in share)])
    print(table(["ranks", "1 link a student", "2", "4", "8", "all"], rows))


if __name__ == "__main__":
    main()
