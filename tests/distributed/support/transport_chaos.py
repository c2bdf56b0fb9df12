"""A seeded soak of the transport: two teachers and a student, and a fault every few seconds.

    python tests/distributed/support/transport_chaos.py [SECONDS=300] [SEED=1]

It takes about SECONDS and a tenth (of 300 s, seed 1 took 335 s on two busy cores).

Faults: SIGKILL of a teacher (started again), SIGSTOP shorter and longer than the timeout, SIGKILL of the student
(resumed from its last tenth step). Every lease is compared with the values the teacher must have sent. Prints each
fault as it is done, then faults, lost and duplicated batches, detection and rejoin times, and the share of time spent
in steps; exits 1 if anything is off.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import statistics
import sys
import time

from transport_peers import Peers

TIMEOUT = 3.0
STEP_SECONDS = 0.02
SAVE_EVERY = 10
LAST_STEPS = 100
"""So close to its end the student is not killed: its teachers would hear that it has finished, and leave."""


class Soak:
    """The processes of one soak and what was seen of them."""

    def __init__(self, steps: int, seed: int):
        self.peers = Peers()
        self.draw = random.Random(seed)
        self.steps = steps
        self.detections: list[float] = []
        self.rejoins: list[float] = []
        self.faults: list[str] = []
        self.consumed: list[int] = []
        self.duplicated = 0
        self.began = time.monotonic()
        self.teachers = [self.peers.teacher(number, timeout=TIMEOUT, pause=STEP_SECONDS) for number in range(2)]
        self.start_student(0)

    def start_student(self, start: int) -> None:
        self.start = start
        self.student = self.peers.student(0, start=start, stop=self.steps, timeout=TIMEOUT, pause=STEP_SECONDS)

    def disturb(self) -> None:
        """Do one fault and see it through."""
        fault = self.draw.choice(["kill teacher", "stop teacher briefly", "stop teacher long", "kill student"])
        number = self.draw.randrange(2)
        if fault == "kill student":
            if self.start + self.count("step ") > self.steps - LAST_STEPS:
                return
            self.student.signal(signal.SIGKILL)
            self.student.await_end()
            self.account()
            self.note(fault, f"after step {len(self.consumed) - 1}")
            self.start_student(len(self.consumed) // SAVE_EVERY * SAVE_EVERY)
            return
        teacher = self.teachers[number]
        if fault == "stop teacher briefly":
            teacher.signal(signal.SIGSTOP)
            self.note(fault, f"teacher {number}, {TIMEOUT / 3:g} s")
            time.sleep(TIMEOUT / 3)
            teacher.signal(signal.SIGCONT)
            return
        lost, joined = self.count(f"lost teacher {number}"), self.count(f"teacher {number} joined")
        began = time.monotonic()
        teacher.signal(signal.SIGKILL if fault == "kill teacher" else signal.SIGSTOP)
        self.note(fault, f"teacher {number}")
        if self.await_more(f"lost teacher {number}", lost):
            self.detections.append(time.monotonic() - began)
        began = time.monotonic()
        if fault == "kill teacher":
            self.teachers[number] = self.peers.teacher(number, timeout=TIMEOUT, pause=STEP_SECONDS)
        else:
            teacher.signal(signal.SIGCONT)
        if self.await_more(f"teacher {number} joined", joined):
            self.rejoins.append(time.monotonic() - began)

    def note(self, fault: str, where: str) -> None:
        self.faults.append(fault)
        print(f"{time.monotonic() - self.began:6.1f} s  {fault}: {where}", file=sys.stderr, flush=True)

    def count(self, words: str) -> int:
        return self.student.errors().count(words)

    def await_more(self, words: str, before: int, seconds: float = 30.0) -> bool:
        """Wait for one more line with `words`; False when the student has finished meanwhile."""
        deadline = time.monotonic() + seconds
        while self.count(words) <= before:
            if self.student.exit_code() is not None:
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"never saw {words!r} again:\n{self.student.errors()[-2000:]}")
            time.sleep(0.02)
        return True

    def account(self) -> None:
        """Enter what the student that just ended has consumed; steps after its last save are redone, not duplicated."""
        del self.consumed[self.start :]
        ids = [int(number) for number in re.findall(r"^step (\d+)$", self.student.errors(), re.MULTILINE)]
        self.duplicated += len(ids) - len(set(ids))
        self.consumed += ids


def run_soak(seconds: float, seed: int) -> dict:
    """Run one soak and return its figures."""
    began = time.monotonic()
    soak = Soak(max(50, int(seconds / (1.2 * STEP_SECONDS))), seed)
    try:
        soak.student.await_line("step 5\n", 60)
        while soak.student.exit_code() is None:
            pause_until = time.monotonic() + soak.draw.uniform(2, 8)
            while time.monotonic() < pause_until and soak.student.exit_code() is None:
                time.sleep(0.05)
            if soak.student.exit_code() is None:
                with contextlib.suppress(ProcessLookupError):  # the run ended in this very moment
                    soak.disturb()
        record = soak.student.result()
        soak.account()
        wall = time.monotonic() - began
        ends = [teacher.result(60)["reason"] for teacher in soak.teachers]
    finally:
        soak.peers.end()
    return {
        "seconds": wall,
        "steps": soak.steps,
        "faults": {name: soak.faults.count(name) for name in sorted(set(soak.faults))},
        "error": record["error"],
        "lost": len(set(range(soak.steps)) - set(soak.consumed)),
        "duplicated": soak.duplicated,
        "in_order": soak.consumed == list(range(soak.steps)),
        "teachers_ended": ends,
        "detection_seconds": _spread(soak.detections),
        "rejoin_seconds": _spread(soak.rejoins),
        "useful_share": soak.steps * STEP_SECONDS / wall,
    }


def _spread(values: list[float]) -> dict | None:
    return {"median": statistics.median(values), "worst": max(values), "count": len(values)} if values else None


def is_clean(figures: dict) -> bool:
    """Return whether nothing was lost, duplicated, reordered or left behind."""
    whole = figures["in_order"] and not (figures["error"] or figures["lost"] or figures["duplicated"])
    return whole and set(figures["teachers_ended"]) == {"finished"}


def format_figures(figures: dict) -> str:
    """Return the figures as the lines that the soak ends with."""
    kinds = ", ".join(f"{count} x {name}" for name, count in figures["faults"].items())
    lines = [
        ("faults", f"{sum(figures['faults'].values())} in {figures['seconds']:.0f} s: {kinds}"),
        ("steps", f"{figures['steps']}, {'all in order' if figures['in_order'] else 'NOT IN ORDER'}"),
        ("lost", f"{figures['lost']} batches"),
        ("duplicated", f"{figures['duplicated']} batches"),
        ("detected after", _format_spread(figures["detection_seconds"], f"a stop at the timeout of {TIMEOUT:g} s")),
        ("joined again after", _format_spread(figures["rejoin_seconds"], "of the restart or continuation")),
        ("useful time", f"{figures['useful_share']:.1%} (steps of {1000 * STEP_SECONDS:g} ms; the rest is mostly "
         "student restarts and the time between a fault and its detection)"),
        ("teachers ended", ", ".join(figures["teachers_ended"])),
        ("student", figures["error"] or "no error"),
        ("verdict", "clean" if is_clean(figures) else "NOT CLEAN"),
    ]  # fmt: skip
    return "\n".join(f"{name:>18}  {value}" for name, value in lines)


def _format_spread(spread: dict | None, remark: str) -> str:
    if spread is None:
        return "no such fault"
    return f"{spread['median']:.2f} s median, {spread['worst']:.2f} s worst of {spread['count']} ({remark})"


def main() -> None:
    seconds, seed = (float(sys.argv[1]) if len(sys.argv) > 1 else 300.0), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(f"a soak of {seconds:g} s, seed {seed}: two teachers, a student, a fault every 2 to 8 s", file=sys.stderr)
    figures = run_soak(seconds, seed)
    print(format_figures(figures))
    sys.exit(0 if is_clean(figures) else 1)


if __name__ == "__main__":
    main()
