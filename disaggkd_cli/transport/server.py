"""The teacher's side: answers the requests of any number of student ranks, one forward at a time or a few.

`serve` runs the forwards in the thread that calls it, and in helpers where several may run at once. One thread watches
the rendezvous, and two threads a link move data, so the next forward runs while earlier replies travel from the link's
send buffers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.transport.announced import Invitations
from disaggkd_cli.transport.answers import MOST_FAILURES, Answerer, Reply
from disaggkd_cli.transport.authentication import NO_SECRET, Secret, other_secret, tell_secret
from disaggkd_cli.transport.backends import describe_device
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.cuda import cuda_of, device_thread
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.protocol import Header, Kind, Request, StopReason
from disaggkd_cli.transport.rendezvous import (
    HEARTBEAT_SECONDS,
    announce_teacher,
    record_heartbeat,
    store_endpoint,
    student_end,
    withdraw_teacher,
)
from disaggkd_cli.transport.request_queue import MOST_REPLIES, SEND_BUFFERS, PendingRequest, RequestQueue
from disaggkd_cli.transport.send_buffers import SendBuffers
from disaggkd_cli.transport.teacher_link import TeacherLink

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
    idle_share: float


def serve(
    connect: Callable[[], dist.Store],
    identity: Identity,
    forward: Callable[[Request], Tensor],
    *,
    timeout: float = 60.0,
    student_wait: float = 300.0,
    bind: str = "loopback",
    find_secret: Callable[[dist.Store], Secret] = lambda store: NO_SECRET,
    checksum: bool = True,
    device: torch.device | None = None,
    backend: str = "auto",
    at_once: int = 1,
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
        find_secret: returns the run's, from the store that `connect` has just returned. Default: none.
        checksum: put a crc32 into each READY; payloads over NCCL have none.
        device: where `forward` computes; payloads are sent from there. Default: the CPU.
        backend: `transport.backend`, see `agree_on_backend`.
        at_once: how many forwards may run at the same time. Each then has a thread of its own that calls `forward`, and
            each link as many more requests in turn; answers need not come in the order of the requests.

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
        find_secret=find_secret,
        checksum=checksum,
        device=device or torch.device("cpu"),
        backend=backend,
        at_once=at_once,
        on_event=on_event,
    )
    return server.run(stop or threading.Event())


class TeacherServer:
    """The state that the threads of one `serve` share; see `teacher_link.LinkOwner` for what its links call.

    `changed` is the lock of all of it and tells of changes; methods take it themselves unless they say otherwise.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        identity: Identity,
        forward: Callable[[Request], Tensor],
        *,
        timeout: float,
        student_wait: float,
        bind: str,
        find_secret: Callable[[dist.Store], Secret],
        checksum: bool,
        device: torch.device,
        backend: str,
        at_once: int,
        on_event: Callable[[str], None] | None,
    ):
        self.identity = replace(identity, **describe_device(device, backend))
        self.checksum = checksum
        self.cuda = cuda_of(device)
        self.buffers = SendBuffers(device)
        self.timeout = timeout
        self.student_wait = student_wait
        self.bind = self._bind = bind
        self.secret, self._find_secret = NO_SECRET, find_secret
        self.faults = Faults(identity.role)
        self.changed = threading.Condition()
        self._connect = connect
        self._on_event = on_event
        self._at_once = at_once
        self._queue = RequestQueue(SEND_BUFFERS + at_once - 1, MOST_REPLIES + at_once - 1)
        self._links: dict[int, TeacherLink] = {}
        self._link_numbers = itertools.count()
        self._ended = ""
        self._leaving = False
        self._failure: BaseException | None = None
        self._alone_since = time.monotonic()
        self._device = device
        self._answerer = Answerer(
            identity, forward, device=device, buffer_of=self._buffer_of, faults=self.faults, log=self._log
        )

    def run(self, stop: threading.Event) -> Served:
        """Serve in the calling thread; see `serve`."""
        if self.cuda is not None:
            self.cuda.enter_thread()
        watcher = threading.Thread(target=self._watch, name="rendezvous watch", daemon=True)
        watcher.start()
        helpers = [
            device_thread(self.cuda, self._help, f"answers {number}", (stop,)) for number in range(1, self._at_once)
        ]
        try:
            for thread in helpers:
                thread.start()
            reason = self._answer_all(stop)
            for thread in helpers:
                thread.join()
            if self._failure is not None:
                raise self._failure
            answerer = self._answerer
            return Served(reason, answerer.requests, answerer.rows, answerer.meter.idle_share())
        except BaseException as error:
            self.fail(error)  # so that helpers take no further request
            raise
        finally:
            self._leave(watcher)

    def _help(self, stop: threading.Event) -> None:
        try:
            self._answer_all(stop)
        except BaseException as error:  # raised by the thread that serves, which may already have raised it
            self.fail(error)

    def _answer_all(self, stop: threading.Event) -> str:
        """Answer request after request until there is a reason to end; return it."""
        answerer = self._answerer
        while True:
            pending, reason = self._next(stop)
            if pending is None:
                return reason
            self._send(pending, answerer.answer(pending))
            if answerer.failures >= MOST_FAILURES:
                count, cause = answerer.failures, answerer.last_error
                raise RunError(f"{self.identity.role}: {count} forwards in a row failed: {cause}")

    def _next(self, stop: threading.Event) -> tuple[PendingRequest | None, str]:
        """Wait for the request whose turn it is, or for the reason to end."""
        with self.changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if stop.is_set():
                    return None, "told to stop"
                if (pending := self._queue.next()) is not None:
                    return pending, ""
                if not self._links:
                    if self._ended:
                        return None, self._ended
                    if time.monotonic() - self._alone_since > self.student_wait:
                        return None, "student vanished"
                self.changed.wait(_WATCH_SECONDS)

    def _send(self, pending: PendingRequest, reply: Reply) -> None:
        """Give a reply to its link; that of a link which is gone by now is dropped."""
        with self.changed:
            link = self._links.get(pending.link)
        if link is not None:
            link.outbox.put(reply)
            if reply.payload is None:
                self.reply_gone(pending.link, pending.buffer)

    def _buffer_of(self, pending: PendingRequest, size: int) -> Tensor:
        with self.changed:
            link = self._links.get(pending.link)
        if link is None:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return link.buffer_of(pending.buffer, size)

    # What links call: see `LinkOwner`

    def link_formed(self, link: TeacherLink) -> None:
        """Let a link take part; one that forms while the teacher leaves is told so."""
        with self.changed:
            self._links[link.number] = link
            self._queue.link_up(link.number)
            self._ended = ""
        self._log(f"{self.identity.role} serves {link.student.role}; {len(self._links)} linked")
        if self._leaving:
            link.hang_up(StopReason.TEACHER_LEAVING)

    def link_ended(self, link: TeacherLink, stop: StopReason | None, cause: str) -> None:
        """Forget a link; what its student said last may end the teacher."""
        with self.changed:
            if self._links.pop(link.number, None) is not None:
                self._queue.link_down(link.number)
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

    def fail(self, error: BaseException) -> None:
        """End serving with `error`, unless another error came first."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def enqueue(self, pending: PendingRequest) -> None:
        """Let a request wait for its turn."""
        with self.changed:
            self._queue.push(pending)
            self.changed.notify_all()

    def reply_gone(self, link: int, buffer: int) -> None:
        """Give a link's credit and the memory of its send buffer back."""
        with self.changed:
            if link in self._links:
                self._links[link].forget_buffer(buffer)
            self._queue.reply_gone(link, buffer)
            self.changed.notify_all()

    def ping(self, link: int) -> Header:
        """Return a PING, which says how long the current forward has run and how much of the link's is open."""
        running = self._answerer.meter.running_seconds()
        busy_ms = max(1, round(1000 * running)) if running else 0
        with self.changed:
            queued = self._queue.open_requests(link)
        return Header(Kind.PING, busy_ms=busy_ms, queued=queued, flags=round(1000 * self._answerer.meter.idle_share()))

    # The rendezvous

    def _watch(self) -> None:
        store, connections, invitations, number, last_heartbeat = None, None, None, -1, 0.0
        lost_since = time.monotonic()
        while not self._leaving:
            try:
                if store is None:
                    store = self._meet()
                    connections = StoreConnections(store)
                    self.bind = resolve_bind(self._bind, store_endpoint(store))
                    number = announce_teacher(store, self.identity, self.secret)
                    invitations = Invitations(store, number, self._log_as_ours, secret=self.secret)
                    self._log(f"{self.identity.role} announced itself as number {number}")
                if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                    record_heartbeat(store, number)
                    last_heartbeat = time.monotonic()
                while (invitation := invitations.next()) is not None:
                    connection = connections.borrow()
                    if connection is None:
                        break  # as many links form already as may; the others are answered at the next look
                    generation, student = invitation
                    invitations.answered(generation)
                    TeacherLink(
                        self, next(self._link_numbers), generation, student, connections, connection, number
                    ).start()
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

    def _meet(self) -> dist.Store:
        """Return the part of the rendezvous where the student of this run looks for its teachers."""
        store = self._connect()
        self.secret = self._find_secret(store)
        tell_secret(store, "teacher", self.secret)
        if problem := other_secret(store, "student", self.secret):
            self._log(f"warning: {problem}")
        return self.secret.rooted(store)

    def _leave(self, watcher: threading.Thread) -> None:
        with self.changed:
            self._leaving = True
            links = list(self._links.values())
        for link in links:
            link.hang_up(StopReason.TEACHER_LEAVING)
        deadline = time.monotonic() + _LINGER_SECONDS
        for thread in [*(link.thread for link in links), watcher]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _log_as_ours(self, line: str) -> None:
        self._log(f"{self.identity.role}: {line}")

    def _log(self, line: str) -> None:
        if self._on_event is not None:
            self._on_event(line)
