"""The teacher's side: answers the requests of any number of student ranks, one forward at a time.

`serve` runs the forwards in the thread that calls it. Behind it one thread watches the rendezvous, and two threads a
link move data, so the next forward runs while earlier replies travel from the link's send buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.transport.answers import MOST_FAILURES, Answerer, ScheduledRequest
from disaggkd_cli.transport.backends import cuda_of, describe_device
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.protocol import Header, Kind, Request, StopReason
from disaggkd_cli.transport.rendezvous import (
    HEARTBEAT_SECONDS,
    announce_teacher,
    new_invitations,
    record_heartbeat,
    store_endpoint,
    student_end,
    withdraw_teacher,
)
from disaggkd_cli.transport.send_buffers import MOST_REPLIES, SendBuffers
from disaggkd_cli.transport.teacher_link import SEND_BUFFERS, PendingRequest, TeacherLink
from disaggkd_cli.transport.turns import next_group

_WATCH_SECONDS = 0.1
_LINGER_SECONDS = 5.0


@dataclass(frozen=True)
class Served:
    """How serving ended.

    `reason`: `finished` or `stopped` (the student said so), `told to stop`, or `student vanished`.
    """

    reason: str
    requests: int
    rows: int
    forwards: int
    idle_share: float


def serve(
    connect: Callable[[], dist.Store],
    identity: Identity,
    forward: Callable[[Request], Tensor],
    *,
    timeout: float = 60.0,
    student_wait: float = 300.0,
    bind: str = "loopback",
    checksum: bool = True,
    merge_tokens: int = 0,
    device: torch.device | None = None,
    backend: str = "auto",
    stop: threading.Event | None = None,
    on_event: Callable[[str], None] | None = None,
) -> Served:
    """Serve hidden states until the student ends, vanishes for `student_wait` seconds, or `stop` is set.

    Args:
        connect: opens the rendezvous store (`open_store(...)`); called again when the store vanished with its host.
        identity: who this teacher is; `hidden_size` and `wire_dtype` define the payload.
        forward: Request -> hidden states [R, H_t] of its rows, finite, any float dtype, on any device; a tensor that
            stays unchanged afterwards, since it may be sent from where it lies.
        timeout: seconds for any one transfer (`transport.timeout`), the same on both sides.
        bind: `launch.bind`, see `resolve_bind`.
        checksum: put a crc32 into each READY; payloads over NCCL have none.
        merge_tokens: requests that wait together, with sequences of one length, share a forward up to this many tokens;
            `forward` then gets them as one request (`merge_requests`). 0 gives each a forward of its own. To be set
            only where a row's hidden states do not depend on what else is in the batch.
        device: where `forward` computes; payloads are sent from there. Default: the CPU.
        backend: `transport.backend`, see `agree_on_backend`.

    Raises:
        UserError: a port, an address, an endpoint or a backend that cannot be.
        RunError: the rendezvous was never there, or `MOST_FAILURES` forwards in a row raised.
    """
    server = TeacherServer(
        connect,
        identity,
        forward,
        timeout=timeout,
        student_wait=student_wait,
        bind=bind,
        checksum=checksum,
        merge_tokens=merge_tokens,
        device=device or torch.device("cpu"),
        backend=backend,
        on_event=on_event,
    )
    return server.run(stop or threading.Event())


class TeacherServer:
    """The state that the threads of one `serve` share."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        identity: Identity,
        forward: Callable[[Request], Tensor],
        *,
        timeout: float,
        student_wait: float,
        bind: str,
        checksum: bool,
        merge_tokens: int,
        device: torch.device,
        backend: str,
        on_event: Callable[[str], None] | None,
    ):
        self.identity = replace(identity, **describe_device(device, backend))
        self.checksum = checksum
        self.device, self.cuda = device, cuda_of(device)
        self.buffers = SendBuffers(device)
        self.timeout = timeout
        self.student_wait = student_wait
        self.bind = self._bind = bind
        self.changed = threading.Condition()
        self._connect = connect
        self._on_event = on_event
        self._links: list[TeacherLink] = []
        self._turn = 0
        self._ended = ""
        self._leaving = False
        self._failure: BaseException | None = None
        self._alone_since = time.monotonic()
        self.faults = Faults(identity.role)
        self._answerer = Answerer(
            identity, forward, device=device, merge_tokens=merge_tokens, faults=self.faults, log=self._log
        )

    def run(self, stop: threading.Event) -> Served:
        watcher = threading.Thread(target=self._watch, name="rendezvous watch", daemon=True)
        watcher.start()
        answerer = self._answerer
        try:
            while True:
                group, reason = self._next(stop)
                if reason:
                    idle = answerer.meter.idle_share()
                    return Served(reason, answerer.requests, answerer.rows, answerer.forwards, idle)
                for turn, reply in answerer.answer(group):
                    turn.link.outbox.put(reply)
                    if reply.payload is None:
                        self.buffer_free(turn.link, turn.buffer)
                    if answerer.failures >= MOST_FAILURES:
                        count, cause = answerer.failures, answerer.last_error
                        raise RunError(f"{self.identity.role}: {count} forwards in a row failed: {cause}")
        finally:
            self._leave(watcher)

    def _next(self, stop: threading.Event) -> tuple[list[ScheduledRequest], str]:
        """Wait for requests whose turn it is, of links that have free send buffers, or for the reason to end."""
        with self.changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if stop.is_set():
                    return [], "told to stop"
                busy = sum(SEND_BUFFERS - len(link.free_buffers) for link in self._links)
                full = busy >= MOST_REPLIES
                group = [] if full else next_group(self._links, self._turn, self._answerer.merge_tokens)
                if group:
                    self._turn = group[0] + 1
                    links = [self._links[index] for index in group]
                    return [
                        ScheduledRequest(link, link.pending.popleft(), link.free_buffers.popleft()) for link in links
                    ], ""
                if not self._links:
                    if self._ended:
                        return [], self._ended
                    if time.monotonic() - self._alone_since > self.student_wait:
                        return [], "student vanished"
                self.changed.wait(_WATCH_SECONDS)

    # What links call

    def link_formed(self, link: TeacherLink) -> None:
        with self.changed:
            self._links.append(link)
            self._ended = ""
        self._log(f"{self.identity.role} serves {link.student.role}; {len(self._links)} linked")
        if self._leaving:
            link.hang_up(StopReason.TEACHER_LEAVING)

    def link_ended(self, link: TeacherLink, stop: StopReason | None, cause: str) -> None:
        with self.changed:
            if link in self._links:
                self._links.remove(link)
                if not self._links:
                    self._alone_since = time.monotonic()
            if stop in (StopReason.FINISHED, StopReason.STOPPED):
                self._ended = stop.name.lower()
            elif stop is StopReason.QUARANTINED:
                # Bad replies are this process's own fault (its memory, its device): a fresh one may do better.
                self._failure = RunError(f"{self.identity.role}: {link.student.role} quarantined it after bad replies")
            elif stop is not None:
                cause = f"it ended the link ({stop.name.lower().replace('_', ' ')})"
            self.changed.notify_all()
        if cause and not self._leaving:
            self._log(f"{self.identity.role} lost {link.student.role}: {cause}; {len(self._links)} linked")

    def fail(self, error: Exception) -> None:
        """End serving with `error`."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def enqueue(self, link: TeacherLink, pending: PendingRequest) -> None:
        with self.changed:
            link.pending.append(pending)
            self.changed.notify_all()

    def buffer_free(self, link: TeacherLink, buffer: int) -> None:
        with self.changed:
            link.forget_buffer(buffer)
            link.free_buffers.append(buffer)
            self.changed.notify_all()

    def ping(self, link: TeacherLink) -> Header:
        """Return a PING, which says how long the current forward has run and how much waits."""
        running = self._answerer.meter.running_seconds()
        busy_ms = max(1, round(1000 * running)) if running else 0
        queued = len(link.pending) + SEND_BUFFERS - len(link.free_buffers)
        return Header(Kind.PING, busy_ms=busy_ms, queued=queued, flags=round(1000 * self._answerer.meter.idle_share()))

    # The rendezvous

    def _watch(self) -> None:
        store, connections, number, answered, last_heartbeat = None, None, -1, 0, 0.0
        lost_since = time.monotonic()
        while not self._leaving:
            try:
                if store is None:
                    store = self._connect()
                    connections = StoreConnections(store)
                    self.bind = resolve_bind(self._bind, store_endpoint(store))
                    number, answered = announce_teacher(store, self.identity), 0
                    self._log(f"{self.identity.role} announced itself as number {number}")
                if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                    record_heartbeat(store, number)
                    last_heartbeat = time.monotonic()
                for generation, student in new_invitations(store, number, answered):
                    connection = connections.borrow()
                    if connection is None:
                        break  # as many links form already as may; the others are answered at the next look
                    answered = generation
                    TeacherLink(self, generation, student, connections, connection, number).start()
                ended = student_end(store)
                lost_since = time.monotonic()
                with self.changed:
                    self._ended = ended or self._ended
                    self.changed.notify_all()
                time.sleep(_WATCH_SECONDS)
            except UserError as error:
                with self.changed:
                    self._failure = error
                    self.changed.notify_all()
                return
            except (RuntimeError, RunError) as error:
                if store is not None:
                    self._log(f"{self.identity.role}: the rendezvous is gone, trying again for {self.student_wait:g} s")
                store = None
                with self.changed:
                    if self._links:
                        lost_since = time.monotonic()
                    elif time.monotonic() - lost_since > self.student_wait:
                        self._failure = self._failure or RunError(f"{self.identity.role}: no rendezvous: {error}")
                        self.changed.notify_all()
                        return
                time.sleep(_WATCH_SECONDS)
        if store is not None:
            try:
                withdraw_teacher(store, number)
            except RuntimeError as error:
                self._log(f"{self.identity.role}: could not withdraw from the rendezvous: {str(error).splitlines()[0]}")

    def _leave(self, watcher: threading.Thread) -> None:
        with self.changed:
            self._leaving = True
            links = list(self._links)
        for link in links:
            link.hang_up(StopReason.TEACHER_LEAVING)
        deadline = time.monotonic() + _LINGER_SECONDS
        for thread in [*(link.thread for link in links), watcher]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _log(self, line: str) -> None:
        if self._on_event is not None:
            self._on_event(line)
