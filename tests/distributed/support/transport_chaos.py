"""A seeded soak of the transport: two teachers and a student, and a fault every few seconds.

    python tests/distributed/support/transport_chaos.py [SECONDS=300] [SEED=1]

It takes about SECONDS and a tenth (of 60 s, seeds 1 and 2 took 64 s and 67 s on two busy cores).

Faults: SIGKILL of a teacher (started again), SIGSTOP shorter and longer than the timeout, SIGKILL of the student
(resumed from its last tenth step). Every lease is compared with the values the teacher must have sent. Prints faults,
lost and repeated batches, detection and rejoin times, and the share of time spent in steps; exits 1 if anything is off.
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
        self.repeated = 0
        self.teachers = [self.peers.teacher(number, timeout=TIMEOUT, pause=STEP_SECONDS) for number in range(2)]
        self.start_student(0)

    def start_student(self, start: int) -> None:
        self.start = start
        self.student = self.peers.student(0, start=start, stop=self.steps, timeout=TIMEOUT, pause=STEP_SECONDS)

    def disturb(self) -> None:
        """Do one fault and see it through."""
        fault = self.draw.choice(["kill", "short stop", "long stop", "kill student"])
        number = self.draw.randrange(2)
        if fault == "kill student":
            self.student.signal(signal.SIGKILL)
            self.student.await_end()
            self.account()
            self.faults.append(fault)
            self.start_student(len(self.consumed) // SAVE_EVERY * SAVE_EVERY)
            return
        teacher = self.teachers[number]
        if fault == "short stop":
            teacher.signal(signal.SIGSTOP)
            self.faults.append(fault)
            time.sleep(TIMEOUT / 3)
            teacher.signal(signal.SIGCONT)
            return
        lost, joined = self.count(f"lost teacher {number}"), self.count(f"teacher {number} joined")
        began = time.monotonic()
        teacher.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        self.faults.append(fault)
        if self.await_more(f"lost teacher {number}", lost):
            self.detections.append(time.monotonic() - began)
        began = time.monotonic()
        if fault == "kill":
            self.teachers[number] = self.peers.teacher(number, timeout=TIMEOUT, pause=STEP_SECONDS)
        else:
            teacher.signal(signal.SIGCONT)
        if self.await_more(f"teacher {number} joined", joined):
            self.rejoins.append(time.monotonic() - began)

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
        """Enter what the student that just ended has consumed; steps after its last save are redone, not repeated."""
        del self.consumed[self.start :]
        ids = [int(number) for number in re.findall(r"^step (\d+)$", self.student.errors(), re.MULTILINE)]
        self.repeated += len(ids) - len(set(ids))
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
        "repeated": soak.repeated,
        "in_order": soak.consumed == list(range(soak.steps)),
        "teachers_ended": ends,
        "detection_seconds": _spread(soak.detections),
        "rejoin_seconds": _spread(soak.rejoins),
        "useful_share": soak.steps * STEP_SECONDS / wall,
    }


def _spread(values: list[float]) -> dict | None:
    return {"median": statistics.median(values), "worst": max(values), "count": len(values)} if values else None


def is_clean(figures: dict) -> bool:
    """Return whether nothing was lost, repeated, reordered or left behind."""
    whole = figures["in_order"] and not (figures["error"] or figures["lost"] or figures["repeated"])
    return whole and set(figures["teachers_ended"]) == {"finished"}


def main() -> None:
    seconds, seed = (float(sys.argv[1]) if len(sys.argv) > 1 else 300.0), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    figures = run_soak(seconds, seed)
    for name, value in figures.items():
        print(f"{name:>18}: {value}")
    sys.exit(0 if is_clean(figures) else 1)


if __name__ == "__main__":
    main()
