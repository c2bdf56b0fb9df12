"""Faults of a teacher's link on demand, for tests; how they are ordered stands in `disaggkd_cli.faults`.

Stages of a pipeline are named `stage 0.1` (replica, stage); what they pass on is a payload like any other.
For example `teacher 1.payload:flip@3` damages the third payload that teacher 1 sends, and `teacher 0.forward:sleep:0.2`
makes it slow. Points and their actions:
  forward   sleep:SECONDS   raise   hang (an hour)   nan   kill   stop (SIGSTOP)
  ready     rows   width   hash   size   (the READY header lies)
  payload   flip (one bit, after the checksum)   kill (SIGKILL while the payload travels)   stop
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

from torch import Tensor

from disaggkd_cli.faults import Orders
from disaggkd_cli.transport.pair import Transfer
from disaggkd_cli.transport.protocol import Header


class Faults:
    """The faults ordered for one role."""

    def __init__(self, role: str):
        self._orders = Orders(role)

    def at_forward(self, hidden: Tensor) -> Tensor:
        """Disturb the result of a forward."""
        for action in self._orders.due("forward"):
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
        for action in self._orders.due("ready"):
            name = field_of[action]
            header = replace(header, **{name: getattr(header, name) ^ 1})
        return header

    def at_payload(self, payload: Tensor, ready: Transfer) -> Tensor:
        """Damage a payload once its READY has gone, or this process a moment after it starts to travel."""
        for action in self._orders.due("payload"):
            ready.wait()
            if action == "flip" and payload.numel():
                payload = payload.clone()
                payload[payload.numel() // 2] ^= 4
            _disturb_process(action, delay=0.001)
        return payload


def _disturb_process(action: str, delay: float) -> None:
    if action == "hang":
        time.sleep(3600)
    if action in ("kill", "stop"):
        number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
        if delay:
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
