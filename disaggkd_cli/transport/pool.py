"""The student rank's teachers: finds them, keeps a link to each, and gives every request to the least loaded one."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.backends import agree_on_backend, describe_device
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.cuda import cuda_of
from disaggkd_cli.transport.errors import IncompatiblePeer, TeachersLost
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.ledger import Entry, Ledger
from disaggkd_cli.transport.neighbours import Neighbourhood
from disaggkd_cli.transport.protocol import StopReason
from disaggkd_cli.transport.rendezvous import (
    HEARTBEAT_SECONDS,
    announced_teachers,
    begin_student,
    end_student,
    heartbeat_count,
    roster_version,
    store_endpoint,
)
from disaggkd_cli.transport.student_link import StudentLink, TeacherRecord

_DISCOVERY_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0
REFUSAL_GRACE_SECONDS = 10.0
"""How long a student without any fitting teacher waits on after it refused one, before it gives up with the reason."""
MOST_REJECTIONS = 3
"""A request whose replies were bad this often fails the run: the fault is then in the request, not in one teacher."""


class TeacherPool:
    """Links of one student rank to teachers, formed and kept in background threads.

    Args:
        store: the rendezvous store; the pool opens connections of its own to it.
        identity: what this student rank says of itself.
        timeout: seconds for any one transfer, and for one forward of a teacher (`transport.timeout`).
        teacher_wait: seconds without any teacher after which `TeachersLost` is raised (`transport.teacher_wait`).
        bind: `launch.bind`, see `resolve_bind`.
        leader: student rank 0 passes True: it tells the teachers through the store when the student ends for good.
        rank, ranks: which student rank this is, of how many.
        links: where there are twice as many teachers or more, a rank links to some of them only, `links` to twice as
            many (`transport.links_per_rank`, see `neighbouring`).
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
        leader: bool = False,
        rank: int = 0,
        ranks: int = 1,
        links: int = 4,
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
        self.leader = leader
        self.changed = threading.Condition()
        self.ledger = Ledger()
        self.failure: BaseException | None = None
        self.events: deque[str] = deque(maxlen=1000)
        self._store = store.clone()
        self.connections = StoreConnections(self._store)
        self._neighbourhood = Neighbourhood(rank, ranks, links)
        self._on_event = on_event
        self._records: dict[int, TeacherRecord] = {}
        self._links: dict[int, StudentLink] = {}
        self._forming: set[StudentLink] = set()
        self._link_numbers = itertools.count(1)
        self._alone_since = time.monotonic()
        self._refused_at: float | None = None
        self._closing = False
        self._closed = threading.Event()
        if leader:
            begin_student(self._store)
        self._discovery = threading.Thread(target=self._discover, name="teacher discovery", daemon=True)
        self._discovery.start()

    def wait_for_teacher(self) -> None:
        """Return as soon as one link is up.

        Raises:
            IncompatiblePeer: only teachers came that do not belong to this student, and no other one within
                `REFUSAL_GRACE_SECONDS` after that.
            TeachersLost: none came within `teacher_wait` seconds.
        """
        with self.changed:
            while not self._links:
                self.check()
                self.changed.wait(0.2)

    def check(self) -> None:
        """Raise what keeps the student from going on, if anything does. The caller holds `changed`."""
        if self.failure is not None:
            raise self.failure
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
        """Return by teacher role: requests, rows, received_bytes, idle_share (as it reports it), linked, backend."""
        with self.changed:
            wanted = ("requests", "rows", "received_bytes", "idle_share", "linked", "backend", "strikes", "blocked")
            return {
                f"{record.identity.role} #{number}": {key: asdict(record)[key] for key in wanted}
                for number, record in self._records.items()
            }

    def close(self, reason: StopReason = StopReason.FINISHED) -> None:
        """Say goodbye on every link and end. From the leader, `FINISHED` and `STOPPED` also end the teachers.

        Bounded: at most `_FAREWELL_SECONDS` for the goodbyes. The leader also waits that long for teachers without a
        link to read the end at the rendezvous, which may vanish with this process.
        """
        with self.changed:
            if self._closing:
                return
            self._closing = True
            self._closed.set()
            links = list(self._links.values())
            self.changed.notify_all()
        ending = self.leader and reason in (StopReason.FINISHED, StopReason.STOPPED)
        if ending:
            try:
                end_student(self._store, reason.name.lower())
            except RuntimeError as error:
                self.log(f"could not leave word at the rendezvous: {error}")
        for link in links:
            link.hang_up(reason if self.leader else StopReason.LINK_CLOSED)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for link in links:
            link.thread.join(max(0.0, deadline - time.monotonic()))
        self._discovery.join(max(0.1, deadline - time.monotonic()))
        if ending:
            self._await_departures(deadline)

    def _await_departures(self, deadline: float) -> None:
        """Wait until no announced teacher has a heartbeat any more."""
        known = {number: record.identity for number, record in self._records.items()}
        seen: dict[int, tuple[int, float]] = {}
        try:
            while time.monotonic() < deadline:
                now = time.monotonic()
                waiting = False
                for number in announced_teachers(self._store, known):
                    before, since = seen.get(number, (-1, now))
                    alive = heartbeat_count(self._store, number)
                    seen[number] = (alive, since if before == alive else now)
                    waiting |= now - seen[number][1] < 2 * HEARTBEAT_SECONDS
                if not waiting:
                    return
                time.sleep(0.05)
        except RuntimeError as error:
            self.log(f"the rendezvous went before the teachers: {str(error).splitlines()[0]}")

    # What links and rings call

    def next_link_number(self) -> int:
        return next(self._link_numbers)

    def log(self, line: str) -> None:
        """Record an event and pass it on."""
        self.events.append(line)
        if self._on_event is not None:
            self._on_event(line)

    def fail(self, error: BaseException) -> None:
        """Make every waiting consumer raise `error`."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def link_formed(self, link: StudentLink) -> None:
        with self.changed:
            self._forming.discard(link)
            self._links[link.number] = link
            link.record.joined += 1
            self.ledger.link_up(link.number)
            self.dispatch()
            self.changed.notify_all()
        again = " again" if link.record.joined > 1 else ""
        way = f", its payloads over {link.record.backend}" if self.cuda else ""
        self.log(f"{link.record.identity.role} joined{again}{way}; {len(self._links)} linked")
        if self._closing:
            link.hang_up(StopReason.LINK_CLOSED)

    def link_ended(self, link: StudentLink, cause: str) -> None:
        with self.changed:
            self._forming.discard(link)
            was_up = self._links.pop(link.number, None) is not None
            link.record.linked = False
            link.record.lost_at, link.record.alive_at_loss = time.monotonic(), None
            orphans = self.ledger.link_down(link.number)
            if was_up and not self._links:
                self._alone_since = time.monotonic()
            if link.record.refused:
                self._refused_at = time.monotonic()
            self.dispatch()
            self.changed.notify_all()
        if not self._closing:
            moved = f"; its {len(orphans)} open requests go to others" if orphans else ""
            verb = "lost" if was_up else "refused" if link.record.blocked else "did not link with"
            blocked = f"; {link.record.blocked}" if link.record.blocked and link.record.blocked != cause else ""
            self.log(f"{verb} {link.record.identity.role}: {cause}{blocked}{moved}; {len(self._links)} linked")

    def dispatch(self) -> None:
        """Hand waiting requests to links. The caller holds `changed`."""
        while (entry := self.ledger.assign()) is not None:
            self._links[entry.link].outbox.put(entry)

    def arriving(self, link: StudentLink, ticket: int) -> Entry:
        with self.changed:
            return self.ledger.arriving(link.number, ticket)

    def delivered(self, link: StudentLink, ticket: int, seconds_per_work: float) -> None:
        with self.changed:
            self.ledger.measured(link.number, seconds_per_work)
            self.ledger.delivered(link.number, ticket)
            self.changed.notify_all()

    def rejected(self, link: StudentLink, entry: Entry, error: Exception) -> None:
        with self.changed:
            self.ledger.rejected(link.number, entry.ticket)
            if entry.rejections >= MOST_REJECTIONS:
                self.fail(RunError(f"request {entry.request_id} failed {entry.rejections} times, the last: {error}"))
            self.dispatch()
            self.changed.notify_all()
        self.log(f"bad reply, asked for again: {error}")

    # Discovery

    def _discover(self) -> None:
        known: dict[int, Identity] = {}
        roster: dict[int, Identity] = {}
        version = -1
        while not self._closing:
            try:
                if (now_at := roster_version(self._store)) != version:
                    version, roster = now_at, announced_teachers(self._store, known)
                    for number, identity in roster.items():
                        if number not in self._records:
                            self._admit(TeacherRecord(number, identity))
                wanted = self._neighbourhood.of(roster, lambda number: heartbeat_count(self._store, number))
                self._seek(sorted(wanted if self._links else roster))
                self._let_go(wanted)
            except (RuntimeError, RunError) as error:
                self.log(f"the rendezvous no longer answers, no further teacher can join: {str(error).splitlines()[0]}")
                return
            self._closed.wait(_DISCOVERY_SECONDS)

    def _seek(self, numbers: list[int]) -> None:
        """Form links to those of these teachers that have none and have a heartbeat."""
        for number in numbers:
            record = self._records[number]
            if record.linked or record.blocked or not _is_due(record, time.monotonic()):
                continue
            record.looked_at = time.monotonic()
            if record.lost_at is not None:
                alive = heartbeat_count(self._store, number)
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

    def _let_go(self, wanted: set[int]) -> None:
        """End links to teachers of other neighbourhoods once they are too many: others serve those teachers."""
        with self.changed:
            links = list(self._links.values())
        others = [link for link in links if link.record.number not in wanted]
        if len(links) > self._neighbourhood.most and len(others) < len(links):
            for link in others:
                link.hang_up(StopReason.LINK_CLOSED)

    def _admit(self, record: TeacherRecord) -> None:
        try:
            compare_identities(self.identity, record.identity)
            agree_on_backend(self.identity, record.identity)
        except IncompatiblePeer as error:
            record.refused, record.blocked = True, str(error)
            self._refused_at = time.monotonic()
            self.log(f"refused {record.identity.role}: {error}")
        with self.changed:
            self._records[record.number] = record

    def _roll(self) -> str:
        if not self._records:
            return "none ever announced itself at the rendezvous"
        return "seen: " + ", ".join(
            f"{record.identity.role} ({'refused' if record.blocked else 'gone'})" for record in self._records.values()
        )


def _is_due(record: TeacherRecord, now: float) -> bool:
    """Whether to read a teacher's heartbeats: less and less often the longer it has been gone."""
    if record.lost_at is None:
        return True
    pause = min(_LONGEST_PAUSE_SECONDS, (now - record.lost_at) / 10)
    return now - record.looked_at >= pause
