"""Faults planted by tests: die, stop or misbehave at a named point. Dead code unless DISAGGKD_TESTING=1."""

from __future__ import annotations

import os
import signal
import time

_counts: dict[str, int] = {}


def fault_point(point: str) -> None:
    """Do what `DISAGGKD_FAULT` asks for at `point`, when `DISAGGKD_TESTING=1`.

    The variable holds `point:action[:argument][@n]` entries separated by commas: `kill` (SIGKILL to this process),
    `stop` (SIGSTOP), `sleep:seconds`, `error` (raise OSError), at the n-th visit of the point only (default 1).
    """
    if os.environ.get("DISAGGKD_TESTING") != "1":
        return
    for entry in filter(None, os.environ.get("DISAGGKD_FAULT", "").split(",")):
        what, _, visit = entry.partition("@")
        name, action, *argument = what.split(":")
        if name != point:
            continue
        _counts[entry] = _counts.get(entry, 0) + 1
        if _counts[entry] != int(visit or 1):
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "sleep":
            time.sleep(float(argument[0]))
        elif action == "error":
            raise OSError(28, "No space left on device")
