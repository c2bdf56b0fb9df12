"""One stage of a pipeline at work: a thread computes, two more receive and send, and the first stage serves besides.

Stages work on different requests at the same time. The first one lets at most `REQUESTS_PER_STAGE` × stages in, one for
each of its serving threads; that is the only bound there is need for, since whatever is inside moves on by itself. A
forward that fails on one stage is answered with an error and the replica goes on; a stage that is lost ends it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from disaggkd_cli.errors import RunError
from disaggkd_cli.replica.ending import Ending, ReplicaBroken
from disaggkd_cli.replica.stage_links import Item
from disaggkd_cli.transport import Request
from disaggkd_cli.transport.meter import BusyMeter
from disaggkd_cli.transport.protocol import StopReason

REQUESTS_PER_STAGE = 2
"""One is computed while another travels."""
_POLL_SECONDS = 0.2

logger = logging.getLogger("disaggkd")
Compute = Callable[[Request, Tensor | None], Tensor]
"""From a request and the states [B, S, H] of the stage before (None on the first) to what leaves this stage, complete:
[B, S, H], or [R, H] on the last."""


class Pipeline(Ending):
    """One rank's side.

    Args:
        name: `teacher 0.1`, for messages.
        stage, stages: which one this is, of how many.
        compute: this stage's forward.
        stop: set when this process is to stop; the first stage's is set here when another stage was told so.
    """

    def __init__(self, name: str, stage: int, stages: int, compute: Compute, stop: threading.Event) -> None:
        super().__init__()
        self.name = name
        self.first, self.last = stage == 0, stage == stages - 1
        self.most = REQUESTS_PER_STAGE * stages
        self.meter = BusyMeter()
        self.computed = 0
        self._compute = compute
        self._stop = stop
        self._said_leaving = False
        self._inbox: deque[Item | StopReason] = deque()
        self._tickets = itertools.count(1)
        self._answers: dict[int, Item] = {}
        self._open: set[int] = set()
        self.output: Any = None
        self.input: Any = None

    # The threads that serve, on the first stage

    def forward(self, request: Request) -> Tensor:
        """Send a request through all stages and return its hidden states [R, H].

        Raises:
            RuntimeError: the forward failed on one of them.
            ReplicaBroken: the replica has lost a stage.
        """
        with self._changed:
            while len(self._open) >= self.most and self._failure is None:
                self._changed.wait(1.0)  # bounded by the links: a stage that is gone or stalled sets the failure
            ticket = next(self._tickets)
            self._open.add(ticket)
            self._inbox.append(Item(ticket, request))
            self._changed.notify_all()
            while ticket not in self._answers:
                if self._failure is not None:
                    raise ReplicaBroken(str(self._failure))
                self._changed.wait(1.0)  # bounded by the links, as above
            answer = self._answers.pop(ticket)
            self._open.discard(ticket)
            self._changed.notify_all()
        if answer.error:
            raise RuntimeError(answer.error)
        answer.slot.open_for_reading()
        states = answer.states.clone()
        self.input.give_back(answer.slot)
        return states

    def finish(self) -> None:
        """Say that there will be no further request: all stages end once those before are done."""
        with self._changed:
            if self._failure is None:
                self.output.put(StopReason.LINK_CLOSED)

    # The thread that computes

    def run(self) -> None:
        """Compute until the first stage says that it is over.

        Raises:
            RunError: a stage is lost.
        """
        while (item := self._next()) is not None:
            if item.error:
                self.output.put(item)
            else:
                self.output.put(self._answer(item))

    def _next(self) -> Item | None:
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RunError(str(self._failure)) from self._failure
                if self._inbox:
                    item = self._inbox.popleft()
                    if not isinstance(item, StopReason):
                        return item
                    self.output.put(item)
                    self._over = True
                if self._over:
                    return None
                if self._stop.is_set() and not self.first and not self._said_leaving:
                    self._said_leaving = True
                    self.output.put(StopReason.TEACHER_LEAVING)
                self._changed.wait(_POLL_SECONDS)

    def _answer(self, item: Item) -> Item:
        begun = self.meter.begin()
        try:
            if item.slot is not None:
                item.slot.open_for_reading()
            states = self._compute(item.request, item.states)
        except Exception as error:  # the student is told, and asks again or gives this teacher up
            return Item(item.ticket, error=f"{self.name}: {type(error).__name__}: {error}")
        finally:
            if item.slot is not None:
                self.input.give_back(item.slot)
            self.meter.end(begun)
        self.computed += 1
        return Item(item.ticket, None if self.last else item.request, states)

    # The threads of the links

    def hear(self, item: Item | StopReason) -> None:
        """Take in what came from the stage before."""
        with self._changed:
            if item is StopReason.TEACHER_LEAVING:
                if self.first:
                    self._stop.set()
                else:
                    self.output.put(item)
            elif self.first and isinstance(item, Item):
                self._answers[item.ticket] = item
            elif self.first:
                self._over = True
            else:
                self._inbox.append(item)
            self._changed.notify_all()
