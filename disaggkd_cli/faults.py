"""Faults on demand, for tests. Without `DISAGGKD_TESTING=1` in the environment nothing here ever happens.

`DISAGGKD_FAULT` holds comma-separated orders `role.point:action[:argument][@n]`, for example
`student 0.after_commit:kill@2`: SIGKILL to student 0 when it passes that point for the second time. Each is done at the
n-th visit of the point (default 1); `sleep:SECONDS` without `@n` at every one. Points of the trainer:
  after_writing (of windows of texts), before_commit, after_commit (around the optimizer step), ckpt_open, ckpt_fsync,
  ckpt_rename (inside a save)
with the actions kill, stop (SIGSTOP), error (a full disk) and sleep. Those of the transport: see `transport.faults`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter


class Orders:
    """The faults ordered for one role, such as `teacher 1`."""

    def __init__(self, role: str) -> None:
        self._orders: list[tuple[str, str, float, int]] = []
        self._passed: Counter[str] = Counter()
        if os.environ.get("DISAGGKD_TESTING") != "1":
            return
        for order in filter(None, os.environ.get("DISAGGKD_FAULT", "").split(",")):
            what, _, visit = order.partition("@")
            place, action, *argument = what.split(":")
            if place.startswith(f"{role}."):
                seconds = float(argument[0]) if argument else 0.0
                self._orders.append((place.removeprefix(f"{role}."), action, seconds, int(visit or 0)))

    def due(self, point: str) -> list[str]:
        """Sleep where that is ordered, and return the other actions that are due at this visit of `point`."""
        if not self._orders:
            return []
        self._passed[point] += 1
        actions = []
        for where, action, seconds, visit in self._orders:
            if where != point or self._passed[point] != (visit or (self._passed[point] if seconds else 1)):
                continue
            time.sleep(seconds)
            if action != "sleep":
                actions.append(action)
        return actions


_of_this_process: Orders | None = None


def fault_point(point: str) -> None:
    """Do what the environment orders for this process at `point`.

    Raises:
        OSError: "No space left on device", for the action `error`.
    """
    global _of_this_process
    if _of_this_process is None:
        role, rank = os.environ.get("DISAGGKD_ROLE", "student"), os.environ.get("RANK", "0")
        _of_this_process = Orders(f"{role} {rank}")
    for action in _of_this_process.due(point):
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "error":
            raise OSError(28, "No space left on device")
