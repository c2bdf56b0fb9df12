"""Faults on demand, for tests. Without `DISAGGKD_TESTING=1` in the environment nothing here ever happens.

`DISAGGKD_FAULT` holds comma-separated orders `role.point:action[:argument][@n]`, for example
`teacher 1.payload:flip@3` (damage the third payload that teacher 1 sends) or `teacher 0.forward:sleep:0.2`.
Points and their actions, each at the n-th visit of the point (default 1), `sleep` without `@n` at every one:
  forward   sleep:SECONDS   raise   hang (an hour)   nan   kill   stop (SIGSTOP)
  ready     rows   width   hash   size   (the READY header lies)
  payload   flip (one bit, after the checksum)   kill (SIGKILL while the payload travels)   stop
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

from torch import Tensor

from disaggkd_cli.transport.protocol import Header


class Faults:
    """The faults ordered for one role."""

    def __init__(self, role: str):
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

    def at_forward(self, hidden: Tensor) -> Tensor:
        """Disturb the result of a forward."""
        for action in self._due("forward"):
            if action == "raise":
                raise RuntimeError("a fault ordered by the test")
            if action == "nan":
                hidden = hidden.clone()
                hidden.view(-1)[-1:] = float("nan")
            _disturb_process(action, delay=0.0)
        return hidden

    def at_ready(self, header: Header) -> Header:
        """Make a READY header lie."""
        field_of = {"rows": "rows", "width": "width", "hash": "token_hash", "size": "body_bytes"}
        for action in self._due("ready"):
            name = field_of[action]
            header = replace(header, **{name: getattr(header, name) ^ 1})
        return header

    def at_payload(self, payload: Tensor) -> Tensor:
        """Damage a payload after its checksum was taken, or this process while it travels."""
        for action in self._due("payload"):
            if action == "flip" and payload.numel():
                payload = payload.clone()
                payload[payload.numel() // 2] ^= 4
            _disturb_process(action, delay=0.003)
        return payload

    def _due(self, point: str) -> list[str]:
        if not self._orders:
            return []
        self._passed[point] += 1
        due = []
        for where, action, seconds, visit in self._orders:
            if where != point or self._passed[point] != (visit or (self._passed[point] if seconds else 1)):
                continue
            time.sleep(seconds)
            if action != "sleep":
                due.append(action)
        return due


def _disturb_process(action: str, delay: float) -> None:
    if action == "hang":
        time.sleep(3600)
    if action in ("kill", "stop"):
        number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
        if delay:
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
