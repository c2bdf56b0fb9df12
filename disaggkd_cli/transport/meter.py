"""How busy a teacher is, over the last seconds rather than over its whole life; and what that says about a run."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_SECONDS = 10.0


class BusyMeter:
    """Measures the share of time in which some work ran, from its `begin()` to its `end()`, since the first `begin()`.

    The share covers the current window and the one before, 10 to 20 seconds in all. Pieces of work may overlap; the
    caller sees to it that one thread calls at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._running: list[float] = []
        self._busy_since: float | None = None
        self._window_began: float | None = None
        self._busy = 0.0
        self._before = (0.0, 0.0)

    def begin(self) -> float:
        """Note that work begins; what this returns is to be given to its `end`."""
        now = self._clock()
        self._running.append(now)
        if self._busy_since is None:
            self._busy_since = now
        if self._window_began is None:
            self._window_began = now
        return now

    def end(self, begun: float) -> None:
        """Note that the work which began then is over."""
        self._running.remove(begun)
        self._roll()
        if not self._running:
            self._busy += self._clock() - max(self._busy_since, self._window_began)
            self._busy_since = None

    def running_seconds(self) -> float:
        """Return how long the oldest work has been running; zero when idle."""
        running = tuple(self._running)
        return self._clock() - min(running) if running else 0.0

    def idle_share(self) -> float:
        """Return the idle share, 0..1; 0 before any work."""
        began, since, now = self._window_began, self._busy_since, self._clock()
        if began is None:
            return 0.0
        busy = self._busy + (now - max(since, began) if since is not None else 0.0) + self._before[0]
        total = now - began + self._before[1]
        return min(1.0, max(0.0, 1.0 - busy / total)) if total > 0 else 0.0

    def _roll(self) -> None:
        now = self._clock()
        if now - self._window_began < WINDOW_SECONDS:
            return
        if self._busy_since is not None:
            self._busy += now - max(self._busy_since, self._window_began)
            self._busy_since = now
        self._before = (self._busy, now - self._window_began)
        self._window_began, self._busy = now, 0.0


def name_bottleneck(stall_share: float, idle_share: float, depth: int) -> str:
    """Return one line that says which side a run waits for and what to change, or an empty text when nothing waits.

    Args:
        stall_share: share of the step time that the student waited for hidden states.
        idle_share: mean idle share of the linked teachers.
        depth: `transport.ring_depth`.
    """
    if stall_share < 0.05:
        if idle_share > 0.5:
            return (
                f"the student is the bottleneck: teachers are idle {idle_share:.0%} of the time; "
                "fewer teacher replicas would do, or more student ranks"
            )
        return ""
    if idle_share < 0.2:
        return (
            f"the teachers are the bottleneck: the student waits {stall_share:.0%} of the time; "
            "raise teacher.replicas, or lower student.ranks"
        )
    if depth < 3:
        return (
            f"the student waits {stall_share:.0%} and the teachers {idle_share:.0%} of the time: too little is on its "
            f"way; raise transport.ring_depth (now {depth})"
        )
    return (
        f"the student waits {stall_share:.0%} and the teachers {idle_share:.0%} of the time: the links are the "
        "bottleneck; a faster network, transport.dtype=bfloat16 or float8, or a deeper transport.ring_depth"
    )
