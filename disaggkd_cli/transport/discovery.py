"""Which teachers there are: a thread of the student rank that reads the rendezvous and says whom to link with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.announced import Roster
from disaggkd_cli.transport.authentication import Secret
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.neighbours import Neighbourhood
from disaggkd_cli.transport.rendezvous import (
    HEARTBEAT_SECONDS,
    heartbeat_count,
    roster_version,
)

_DISCOVERY_SECONDS = 0.2
_SLOWEST = 25
"""Times as long between two looks at most, while what is read there breaks the connection."""


class TeacherSeeker(Protocol):
    """What discovery tells, from its own thread, which holds no lock then."""

    def meet(self, number: int, identity: Identity) -> None:
        """A teacher that was not known has announced itself under `number`."""

    def is_linked(self) -> bool:
        """Return whether there is any link."""

    def seek(self, numbers: list[int], heartbeat: Callable[[int], int]) -> None:
        """Form links to those of these teachers that have none and are alive: whose `heartbeat` counts on."""

    def let_go(self, wanted: set[int]) -> None:
        """End links to others than these teachers, once they are too many."""

    def log(self, line: str) -> None:
        """Record a line for people."""


class Discovery:
    """Reads the rendezvous until it is stopped.

    Args:
        store: this thread's connection.
        neighbourhood: whom of many teachers to link with.
        seeker: who is told.
        secret: of the run.
    """

    def __init__(self, store: dist.Store, neighbourhood: Neighbourhood, seeker: TeacherSeeker, secret: Secret):
        self._roster = Roster(store, seeker.log, secret=secret)
        self._neighbourhood = neighbourhood
        self._seeker = seeker
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="teacher discovery", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopped.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, at most so long."""
        self._thread.join(seconds)

    @property
    def store(self) -> dist.Store:
        """The connection to the rendezvous that works."""
        return self._roster.store

    def _heartbeat(self, number: int) -> int:
        return heartbeat_count(self.store, number)

    def _run(self) -> None:
        roster: dict[int, Identity] = {}
        met: set[int] = set()
        version, failures = -1, 0
        while not self._stopped.is_set():
            try:
                if (now_at := roster_version(self.store)) != version or not self._roster.is_complete:
                    version, roster = now_at, self._roster.read()
                    for number in sorted(roster.keys() - met):
                        self._seeker.meet(number, roster[number])
                        met.add(number)
                wanted = self._neighbourhood.of(roster, self._heartbeat)
                self._seeker.seek(sorted(wanted if self._seeker.is_linked() else roster), self._heartbeat)
                self._seeker.let_go(wanted)
                failures = 0
            except (RuntimeError, RunError) as error:
                if not self._lives_on(error):
                    return
                version, failures = -1, failures + 1
            self._stopped.wait(_DISCOVERY_SECONDS * min(2**failures, _SLOWEST))

    def _lives_on(self, error: Exception) -> bool:
        """Return whether the store still answers after an error, over a new connection then."""
        try:
            self._roster.repair(self.store.clone())
            return True
        except RuntimeError:
            line = str(error).splitlines()[0]
            self._seeker.log(f"the rendezvous no longer answers, no further teacher can join: {line}")
            return False

    def await_departures(self, deadline: float) -> None:
        """Wait, until `deadline` of the monotonic clock at most, for the last heartbeat of every announced teacher."""
        seen: dict[int, tuple[int, float]] = {}
        try:
            while time.monotonic() < deadline:
                now = time.monotonic()
                waiting = False
                for number in self._roster.read():
                    before, since = seen.get(number, (-1, now))
                    alive = self._heartbeat(number)
                    seen[number] = (alive, since if before == alive else now)
                    waiting |= now - seen[number][1] < 2 * HEARTBEAT_SECONDS
                if not waiting:
                    return
                time.sleep(0.05)
        except RuntimeError as error:
            self._seeker.log(f"the rendezvous went before the teachers: {str(error).splitlines()[0]}")
