"""Which forward comes next, agreed by all ranks of a replica: collectives in a forward need every rank, every time.

Rank 0 leads. A rank that has a request to answer tells the leader; the leader announces a round to all; every rank then
runs one forward, of its own request where it has one, of a tiny idle one where it has not. With `shared` the leader's
request is announced with the round and all ranks run that one. Nobody is asked for anything while nobody has work.

What is said (headers of the transport's protocol, which carry no more than a number here):
  leader → others   REQUEST ticket=n [body]   round n begins, with the request itself when it is shared
                    STOP teacher leaving      stop serving: a rank of the replica has
                    STOP link closed          the last word: no further round (said back by the others)
  other → leader    READY ticket=n            I have brought a request, having begun n rounds
                    STOP teacher leaving      I have stopped serving
A wish that crosses an announcement is not an extra round: its number shows that the announced round takes it along.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from disaggkd_cli.errors import RunError
from disaggkd_cli.replica.ending import Ending, ReplicaBroken
from disaggkd_cli.transport.errors import ProtocolError
from disaggkd_cli.transport.protocol import (
    Header,
    Kind,
    Request,
    StopReason,
    decode_request,
    request_body,
    request_header,
    stop_reason,
)

LEADER = 0
Say = Callable[[Header, Tensor | None], None]


class Task:
    """A request that this rank is to answer, and its answer once a round has computed it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.states: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """One forward of all ranks: `request` is what this rank computes (None: the idle one), `task` who waits for it."""

    number: int
    request: Request | None
    task: Task | None


class Rounds(Ending):
    """One rank's side of the agreement. One thread brings requests, another runs the rounds, others deliver messages.

    Args:
        name: `teacher 0.1`, for messages; `peers` has the others' names by rank.
        rank: among the replica's; 0 leads.
        say: by rank, how to reach the others: all of them for the leader, only the leader for the rest.
        shared: every round computes the leader's request on all ranks.
        leave_seconds: how long the other ranks may take to stop serving once one has.
        on_leave: called, maybe twice, when this rank is to stop serving since another one has.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        say: Mapping[int, Say],
        peers: Mapping[int, str],
        *,
        shared: bool,
        leave_seconds: float,
        on_leave: Callable[[], None],
    ) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.shared = shared
        self.begun = 0
        self.idle_rounds = 0
        self._say = dict(say)
        self._peers = dict(peers)
        self._leave_seconds = leave_seconds
        self._on_leave = on_leave
        self._task: Task | None = None
        self._announced: deque[Request | None] = deque()
        self._wishes: set[int] = set()
        self._left: set[int] = set()
        self._leaving_since: float | None = None

    # The thread that serves

    def compute(self, request: Request) -> Tensor:
        """Bring a request into the next round and return its hidden states.

        Raises:
            ReplicaBroken: the replica has lost a rank, or its forward failed.
        """
        task = Task(request)
        with self._changed:
            self._task = task
            if self.rank != LEADER:
                self._say[LEADER](Header(Kind.READY, ticket=self.begun), None)
            self._changed.notify_all()
            while task.states is None:
                if self._failure is not None:
                    raise ReplicaBroken(str(self._failure))
                self._changed.wait(1.0)  # bounded by the links: a peer that is gone or stalled sets the failure
        return task.states

    def leave(self) -> None:
        """Say that this rank serves no longer; rounds go on until all ranks have left."""
        with self._changed:
            if self.rank == LEADER:
                self._rank_left(LEADER)
            elif self._failure is None:
                self._say[LEADER](Header(Kind.STOP, flags=StopReason.TEACHER_LEAVING), None)
            self._changed.notify_all()

    # The thread that runs the rounds

    def next(self) -> Round | None:
        """Wait for the next round and begin it; None when there will be none.

        Raises:
            RunError: a rank of the replica is lost, or did not stop serving in time.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RunError(str(self._failure)) from self._failure
                if self.rank == LEADER and (self._task is not None or self._wishes):
                    return self._lead_round()
                if self._announced:
                    return self._begin(self._announced.popleft())
                if self._over or (self.rank == LEADER and self._all_left()):
                    self._over = True
                    for say in self._say.values():
                        say(Header(Kind.STOP, flags=StopReason.LINK_CLOSED), None)
                    return None
                self._changed.wait(1.0)  # bounded by the links, as above

    def finish(self, done: Round, states: Tensor) -> None:
        """Hand a round's answer to whoever brought the request."""
        if done.request is None:
            self.idle_rounds += 1
        if done.task is None:
            return
        with self._changed:
            done.task.states = states
            self._changed.notify_all()

    # Threads that deliver messages

    def hear(self, peer: int, header: Header, body: Tensor | None) -> None:
        """Take in what another rank said.

        Raises:
            ProtocolError: it makes no sense here.
        """
        with self._changed:
            if header.kind is Kind.STOP:
                self._hear_stop(peer, header)
            elif self.rank == LEADER and header.kind is Kind.READY:
                if header.ticket == self.begun:
                    self._wishes.add(peer)
            elif self.rank != LEADER and header.kind is Kind.REQUEST:
                if header.ticket != self.begun + len(self._announced) + 1:
                    raise ProtocolError(f"{self.name}: round {header.ticket} announced after round {self.begun}")
                self._announced.append(None if body is None else decode_request(header, body))
            else:
                raise ProtocolError(f"{self.name}: {header.kind.name} from {self._peers[peer]}")
            self._changed.notify_all()

    def _hear_stop(self, peer: int, header: Header) -> None:
        if stop_reason(header) is StopReason.LINK_CLOSED:
            self._over = True
        elif self.rank == LEADER:
            self._rank_left(peer)
        else:
            self._on_leave()

    # All of these hold the lock

    def _lead_round(self) -> Round:
        self._wishes.clear()
        if self.shared:
            body = request_body(self._task.request)
            self._say_to_all(request_header(self._task.request, body, self.begun + 1), body)
            return self._begin(self._task.request)
        self._say_to_all(Header(Kind.REQUEST, ticket=self.begun + 1))
        return self._begin(None)

    def _begin(self, announced: Request | None) -> Round:
        self.begun += 1
        task, self._task = self._task, None
        return Round(self.begun, announced if task is None else task.request, task)

    def _rank_left(self, rank: int) -> None:
        self._left.add(rank)
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
            self._on_leave()
            self._say_to_all(Header(Kind.STOP, flags=StopReason.TEACHER_LEAVING))

    def _all_left(self) -> bool:
        missing = [name for rank, name in self._peers.items() if rank not in self._left]
        if LEADER in self._left and not missing:
            return True
        late = self._leaving_since is not None and time.monotonic() - self._leaving_since > self._leave_seconds
        if late and missing:
            raise RunError(f"{self.name}: {', '.join(missing)} did not stop serving within {self._leave_seconds:g} s")
        return False

    def _say_to_all(self, header: Header, body: Tensor | None = None) -> None:
        if self.rank == LEADER:
            for say in self._say.values():
                say(header, body)
