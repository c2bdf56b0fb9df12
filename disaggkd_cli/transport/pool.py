"""The student rank's teachers: keeps a link to each, and gives every request of its rings to the least loaded one."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.authentication import NO_SECRET, Secret, other_secret, tell_secret
from disaggkd_cli.transport.backends import agree_on_backend, describe_device
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.cuda import cuda_of
from disaggkd_cli.transport.discovery import Discovery
from disaggkd_cli.transport.errors import IncompatiblePeer, RequestsExhausted, TeachersLost
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.ledger import Ledger, OutgoingRequest, State
from disaggkd_cli.transport.neighbours import Neighbourhood
from disaggkd_cli.transport.probe import compare_probes, refuse_other_bits
from disaggkd_cli.transport.protocol import StopReason
from disaggkd_cli.transport.rendezvous import begin_student, end_student, store_endpoint
from disaggkd_cli.transport.slots import Slot
from disaggkd_cli.transport.student_link import StudentLink, TeacherRecord

_LONGEST_PAUSE_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0
REFUSAL_GRACE_SECONDS = 10.0
"""How long a student without any fitting teacher waits on after it refused one, before it gives up with the reason."""
REJECTING_TEACHERS = 2
"""A request that so many teachers answered badly fails the run: the fault is then in the request, not in a teacher."""


class TeacherPool:
    """Links of one student rank to teachers, formed and kept in background threads.

    One lock guards the ledger, the links and the records; public methods take it themselves, and nobody else may hold
    it. Rings call `open_ring` to `release`, links (`student_link.LinkOwner`) `joined` to `rejected`, discovery
    (`discovery.TeacherSeeker`) `meet` to `let_go`.

    Args:
        store: the rendezvous store; the pool opens connections of its own to it.
        identity: what this student rank says of itself.
        timeout: seconds for any one transfer, and for one forward of a teacher (`transport.timeout`).
        teacher_wait: seconds without any teacher after which `TeachersLost` is raised (`transport.teacher_wait`).
        bind: `launch.bind`, see `resolve_bind`.
        secret: of the run, which its teachers have too. Default: none.
        leader: student rank 0 passes True: it tells the teachers through the store when the student ends for good.
        rank, ranks: which student rank this is, of how many.
        links: where there are twice as many teachers or more, a rank links to some of them only, `links` to twice as
            many (`transport.links_per_rank`, see `neighbouring`).
        mixed: teachers that compute other bits than the first one may serve too (`transport.mixed_teachers`).
        device: where this rank computes, and its rings' slots lie. Default: the CPU.
        backend: `transport.backend`, see `agree_on_backend`.
        on_event: called with one line when a link joins or dies, from a background thread.
    """

    def __init__(
        self,
        store: dist.Store,
        identity: Identity,
        *,
        timeout: float = 60.0,
        teacher_wait: float = 300.0,
        bind: str = "loopback",
        secret: Secret = NO_SECRET,
        leader: bool = False,
        rank: int = 0,
        ranks: int = 1,
        links: int = 4,
        mixed: bool = False,
        device: torch.device | None = None,
        backend: str = "auto",
        on_event: Callable[[str], None] | None = None,
    ):
        device = device or torch.device("cpu")
        self.identity = replace(identity, **describe_device(device, backend))
        self.cuda = cuda_of(device)
        self.timeout = timeout
        self.teacher_wait = teacher_wait
        self.bind = resolve_bind(bind, store_endpoint(store))
        self.secret = secret
        self.leader = leader
        self.mixed = mixed
        self._changed = threading.Condition()
        self._ledger = Ledger()
        self._failure: BaseException | None = None
        self.events: deque[str] = deque(maxlen=1000)
        self._meeting = store.clone()
        self._store = self.secret.rooted(store.clone())
        self.connections = StoreConnections(self._store)
        self._neighbourhood = Neighbourhood(rank, ranks, links)
        self._on_event = on_event
        self._records: dict[int, TeacherRecord] = {}
        self._links: dict[int, StudentLink] = {}
        self._forming: set[StudentLink] = set()
        self._link_numbers = itertools.count(1)
        self._alone_since = time.monotonic()
        self._refused_at: float | None = None
        self._rejected_since: WeakKeyDictionary[OutgoingRequest, float] = WeakKeyDictionary()
        self._closing = False
        if leader:
            begin_student(self._store)
            tell_secret(self._meeting, "student", self.secret)
        self._discovery = Discovery(self._store, self._neighbourhood, self, self.secret)
        self._discovery.start()

    def wait_for_teacher(self) -> None:
        """Return as soon as one link is up.

        Raises:
            IncompatiblePeer: only teachers came that do not belong to this student, and no other one within
                `REFUSAL_GRACE_SECONDS` after that.
            TeachersLost: none came within `teacher_wait` seconds.
        """
        with self._changed:
            while not self._links:
                self._check()
                self._changed.wait(0.2)

    def _check(self) -> None:
        """Raise what keeps the student from going on, if anything does. The caller holds the lock."""
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RunError("the teacher pool is closed")
        if self._links:
            return
        alone = time.monotonic() - self._alone_since
        records = self._records.values()
        if self._refused_at is not None and all(record.refused for record in records):
            if time.monotonic() - self._refused_at > min(REFUSAL_GRACE_SECONDS, self.teacher_wait):
                raise IncompatiblePeer(" || ".join(record.blocked for record in records))
        if alone > self.teacher_wait:
            limit = f"transport.teacher_wait={self.teacher_wait:g}"
            raise TeachersLost(f"no teacher for {alone:.0f} s ({limit}); {self._roll()}")

    @property
    def teachers(self) -> int:
        """How many teachers are linked now."""
        return len(self._links)

    def stats(self) -> dict[str, dict]:
        """Return by teacher role: requests, rows, received_bytes, idle_share (as it reports it), linked, backend,
        strikes, blocked (why it may not serve), other_bits (than the first teacher's)."""
        with self._changed:
            wanted = (
                "requests",
                "rows",
                "received_bytes",
                "idle_share",
                "linked",
                "backend",
                "strikes",
                "blocked",
                "other_bits",
            )
            return {
                f"{record.identity.role} #{number}": {key: asdict(record)[key] for key in wanted}
                for number, record in self._records.items()
            }

    def close(self, reason: StopReason = StopReason.FINISHED) -> None:
        """Say goodbye on every link and end. From the leader, `FINISHED` and `STOPPED` also end the teachers.

        Bounded: at most `_FAREWELL_SECONDS` for the goodbyes. The leader also waits that long for teachers without a
        link to read the end at the rendezvous, which may vanish with this process.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            links = list(self._links.values())
            self._changed.notify_all()
        self._discovery.stop()
        ending = self.leader and reason in (StopReason.FINISHED, StopReason.STOPPED)
        if ending:
            try:
                end_student(self._discovery.store, reason.name.lower())
            except RuntimeError as error:
                self.log(f"could not leave word at the rendezvous: {error}")
        for link in links:
            link.hang_up(reason if self.leader else StopReason.LINK_CLOSED)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for link in links:
            link.thread.join(max(0.0, deadline - time.monotonic()))
        self._discovery.join(max(0.1, deadline - time.monotonic()))
        if ending:
            self._discovery.await_departures(deadline)

    def log(self, line: str) -> None:
        """Record an event and pass it on. The caller does not hold the lock."""
        self.events.append(line)
        if self._on_event is not None:
            self._on_event(line)

    def fail(self, error: BaseException) -> None:
        """Make every waiting consumer raise `error`, unless another one came first."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """See `fail`. The caller holds the lock."""
        self._failure = self._failure or error
        self._changed.notify_all()

    # What rings call

    def open_ring(self, slots: Sequence[Slot]) -> int:
        """Return the number of a new consumer, whose replies go into `slots`."""
        with self._changed:
            return self._ledger.open_consumer(slots)

    def close_ring(self, consumer: int) -> None:
        """Drop what a consumer still waits for; twice does nothing."""
        with self._changed:
            self._ledger.close_consumer(consumer)
            self._changed.notify_all()

    def await_credit(self, consumer: int) -> bool:
        """Wait until a request may be admitted; return False once the consumer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._ledger.is_open(consumer) or self._ledger.has_credit(consumer))
            return self._ledger.is_open(consumer)

    def admit(self, consumer: int, outgoing: OutgoingRequest, needs_slot: bool) -> bool:
        """Take a request in, for which there is credit, and send it on; return False if the consumer is closed."""
        with self._changed:
            if not self._ledger.is_open(consumer):
                return False
            self._ledger.admit(consumer, outgoing, needs_slot)
            self._dispatch()
            self._changed.notify_all()
            return True

    def complete(self, consumer: int) -> None:
        """Note that a consumer has no further request to admit."""
        with self._changed:
            self._ledger.complete(consumer)
            self._changed.notify_all()

    def ready(self, consumer: int) -> int:
        """Return how many replies lie ready to be taken."""
        with self._changed:
            return self._ledger.count(consumer, State.READY) if self._ledger.is_open(consumer) else 0

    def take(self, consumer: int) -> OutgoingRequest:
        """Return the next request of a consumer in order, its reply in its slot, waiting for it if need be.

        Raises:
            RequestsExhausted: all requests that the consumer will ever have were taken.
            TeachersLost, IncompatiblePeer: see `wait_for_teacher`.
            RunError: the consumer is closed; or what `fail` was given.
        """
        with self._changed:
            while True:
                if not self._ledger.is_open(consumer):
                    raise RunError("the ring is closed")
                if (outgoing := self._ledger.take(consumer)) is not None:
                    self._changed.notify_all()
                    return outgoing
                if self._ledger.is_finished(consumer):
                    raise RequestsExhausted("the ring's requests have all been taken")
                self._check()
                self._changed.wait(0.2)

    def release(self, outgoing: OutgoingRequest) -> None:
        """Give the slot of a request that was taken back; twice does nothing."""
        with self._changed:
            self._ledger.release(outgoing)
            self._changed.notify_all()

    # What links call: see `student_link.LinkOwner`

    def next_link_number(self) -> int:
        """Return a number that no link of this pool has had."""
        return next(self._link_numbers)

    def joined(self, link: StudentLink) -> None:
        """Let a link that has formed take requests."""
        with self._changed:
            self._forming.discard(link)
            self._links[link.number] = link
            link.record.joined += 1
            self._ledger.link_up(link.number, link.record.identity.role)
            self._dispatch()
            self._changed.notify_all()
        again = " again" if link.record.joined > 1 else ""
        way = f", its payloads over {link.record.backend}" if self.cuda else ""
        self.log(f"{link.record.identity.role} joined{again}{way}; {len(self._links)} linked")
        if self._closing:
            link.hang_up(StopReason.LINK_CLOSED)

    def lost(self, link: StudentLink, cause: str) -> None:
        """Forget a link, all of whose transfers are over; its open requests go to others."""
        with self._changed:
            self._forming.discard(link)
            was_up = self._links.pop(link.number, None) is not None
            link.record.linked = False
            link.record.lost_at, link.record.alive_at_loss = time.monotonic(), None
            orphans = self._ledger.link_down(link.number)
            if was_up and not self._links:
                self._alone_since = time.monotonic()
            if link.record.refused:
                self._refused_at = time.monotonic()
            self._dispatch()
            self._changed.notify_all()
        if not self._closing:
            moved = f"; its {len(orphans)} open requests go to others" if orphans else ""
            verb = "lost" if was_up else "refused" if link.record.blocked else "did not link with"
            blocked = f"; {link.record.blocked}" if link.record.blocked and link.record.blocked != cause else ""
            self.log(f"{verb} {link.record.identity.role}: {cause}{blocked}{moved}; {len(self._links)} linked")

    def arriving(self, link: StudentLink, ticket: int) -> OutgoingRequest:
        """Return the request whose reply has been announced; its slot is being written from now on.

        Raises:
            StaleReply: the ticket is not open on this link.
        """
        with self._changed:
            return self._ledger.arriving(link.number, ticket)

    def delivered(self, link: StudentLink, ticket: int, seconds_per_work: float) -> None:
        """Note that a reply lies verified in its slot, and how fast it came."""
        with self._changed:
            self._ledger.measured(link.number, seconds_per_work)
            self._ledger.delivered(link.number, ticket)
            self._changed.notify_all()

    def rejected(self, link: StudentLink, outgoing: OutgoingRequest, error: Exception) -> None:
        """Note that a reply was bad; the request goes out again, to another teacher if there is one.

        What several teachers answer badly fails the run, and so does what the only one does again and again while no
        other comes for `teacher_wait` seconds.
        """
        with self._changed:
            self._ledger.rejected(link.number, outgoing.ticket)
            now = time.monotonic()
            since = self._rejected_since.setdefault(outgoing, now)
            teachers = len(outgoing.rejected_by)
            if teachers >= REJECTING_TEACHERS or now - since > self.teacher_wait:
                who = f"by {' and '.join(sorted(outgoing.rejected_by))}"
                self._fail(
                    RunError(
                        f"request {outgoing.request_id} was answered badly {outgoing.rejections} times, {who}; "
                        f"the last: {error}"
                    )
                )
            self._dispatch()
            self._changed.notify_all()
        self.log(f"bad reply, asked for again: {error}")

    def _dispatch(self) -> None:
        """Hand waiting requests to links. The caller holds the lock."""
        while (outgoing := self._ledger.assign()) is not None:
            self._links[outgoing.link].outbox.put(outgoing)

    # What discovery calls: see `discovery.TeacherSeeker`

    def meet(self, number: int, identity: Identity) -> None:
        """Note a teacher; one that does not belong to this student is refused."""
        record = TeacherRecord(number, identity)
        try:
            compare_identities(self.identity, identity)
            agree_on_backend(self.identity, identity)
            if not self.mixed:
                refuse_other_bits(self._discovery.store, identity, self.secret)
            elif problem := compare_probes(self._discovery.store, identity, self.secret):
                record.other_bits = True
                self.log(f"{problem}; this run is not reproducible bit for bit (transport.mixed_teachers=true)")
        except IncompatiblePeer as error:
            record.refused, record.blocked = True, str(error)
            self.log(f"refused {identity.role}: {error}")
        with self._changed:
            self._records[number] = record
            if record.refused:
                self._refused_at = time.monotonic()

    def is_linked(self) -> bool:
        """Return whether there is any link."""
        return bool(self._links)

    def seek(self, numbers: list[int], heartbeat: Callable[[int], int]) -> None:
        """Form links to those of these teachers that have none and have a heartbeat."""
        for number in numbers:
            record = self._records[number]
            if record.linked or record.blocked or not _is_due(record, time.monotonic()):
                continue
            record.looked_at = time.monotonic()
            if record.lost_at is not None:
                alive = heartbeat(number)
                if record.alive_at_loss is None:
                    record.alive_at_loss = alive
                if alive == record.alive_at_loss:
                    continue
            connection = self.connections.borrow()
            if connection is None:
                return  # as many links form already as may; the others' turn comes at the next look
            record.linked = True
            link = StudentLink(self, record, connection)
            self._forming.add(link)
            link.start()

    def let_go(self, wanted: set[int]) -> None:
        """End links to teachers of other neighbourhoods once they are too many: others serve those teachers."""
        with self._changed:
            links = list(self._links.values())
        others = [link for link in links if link.record.number not in wanted]
        if len(links) > self._neighbourhood.most and len(others) < len(links):
            for link in others:
                link.hang_up(StopReason.LINK_CLOSED)

    def _roll(self) -> str:
        if not self._records:
            return f"none ever announced itself at the rendezvous{self._other_secret()}"
        return "seen: " + ", ".join(
            f"{record.identity.role} ({'refused' if record.blocked else 'gone'})" for record in self._records.values()
        )

    def _other_secret(self) -> str:
        try:
            problem = other_secret(self._meeting, "teacher", self.secret)
        except RuntimeError:
            return ""
        return f"; {problem}" if problem else ""


def _is_due(record: TeacherRecord, now: float) -> bool:
    """Whether to read a teacher's heartbeats: less and less often the longer it has been gone."""
    if record.lost_at is None:
        return True
    pause = min(_LONGEST_PAUSE_SECONDS, (now - record.lost_at) / 10)
    return now - record.looked_at >= pause
