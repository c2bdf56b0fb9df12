"""Reading what others wrote at the rendezvous. Whoever reaches it can write there: a bad entry is skipped and named."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from disaggkd_cli.transport.authentication import NO_SECRET, Secret
from disaggkd_cli.transport.errors import ProtocolError
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.rendezvous import MOST_TEACHERS, changes_key, invitation_keys, teacher_key, teachers_key

MOST_NEW = 500
"""Entries that one look takes in; the next look goes on from there."""
VOID_SECONDS = 10.0
"""A number that has no entry for so long was never meant, or its writer died between the two."""


class Roster:
    """The teachers that announced themselves.

    Args:
        store: a connection that nobody else uses; may be exchanged after it broke.
        log: told of each bad entry, once.
        clock: seconds.
        secret: of the run; an entry that it did not seal is a bad one.
    """

    def __init__(
        self,
        store: dist.Store,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        secret: Secret = NO_SECRET,
    ):
        self.store = store
        self._secret = secret
        self._log = log
        self._clock = clock
        self._identities: dict[int, Identity] = {}
        self._over: set[int] = set()
        self._missing_since: dict[int, float] = {}
        self._named: set[str] = set()
        self._more = False

    def read(self) -> dict[int, Identity]:
        """Return the teachers announced so far, by number, less those that withdrew.

        Raises:
            RuntimeError: the store does not answer, or not with what it should; see `repair`.
        """
        count = self.store.add(teachers_key(), 0)
        if not 0 <= count <= MOST_TEACHERS:
            believed = self._highest() + 1
            self._name(f"the rendezvous counted {count} teachers, more than {MOST_TEACHERS}: from {believed} again")
            self.store.set(teachers_key(), str(believed))
            count = believed
        new, self._more = 0, False
        for number in range(count):
            if number in self._over:
                continue
            if number not in self._identities:
                if new == MOST_NEW:
                    self._more = True
                    break
                new += number not in self._missing_since
                self._take_in(number)
            elif self.store.check([teacher_key(number, "withdrawn")]):
                self._over.add(number)
        return {number: known for number, known in self._identities.items() if number not in self._over}

    @property
    def is_complete(self) -> bool:
        """Whether all entries were looked at and none is missing; else look again even where nothing changed."""
        return not self._missing_since and not self._more

    def _take_in(self, number: int) -> None:
        key = teacher_key(number, "identity")
        if not self.store.check([key]):
            since = self._missing_since.setdefault(number, self._clock())
            if self._clock() - since > VOID_SECONDS:
                self._over.add(number)
                del self._missing_since[number]
            return
        self._missing_since.pop(number, None)
        try:
            self._identities[number] = Identity.decode(self._secret.open(key, self.store.get(key)))
        except ProtocolError as error:
            self._over.add(number)
            self._name(f"teacher number {number} at the rendezvous is skipped: {error}")
            return
        if self.store.check([teacher_key(number, "withdrawn")]):
            self._over.add(number)

    def repair(self, store: dist.Store) -> None:
        """Go on over `store`, a new connection after the old one broke, and put right counters that are no numbers.

        A store ends the connection of whoever adds to a text, so one of those would keep every rank from ever reading.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.store = store
        for key, value in ((teachers_key(), self._highest() + 1), (changes_key(), int(1000 * self._clock()))):
            if store.check([key]) and not _is_number(store.get(key)):
                store.set(key, str(value))
                self._name(f"the rendezvous held no number as {key}; it counts from {value} again")

    def _highest(self) -> int:
        return max((*self._identities, *self._over), default=-1)

    def _name(self, line: str) -> None:
        if line not in self._named:
            self._named.add(line)
            self._log(line)


class Invitations:
    """The invitations of one announced teacher.

    Args:
        store, log, clock, secret: see `Roster`.
        number: the teacher's.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        secret: Secret = NO_SECRET,
    ):
        self._store = store
        self._secret = secret
        self._number = number
        self._log = log
        self._clock = clock
        self._answered = 0
        self._missing_since: float | None = None

    def next(self) -> tuple[int, Identity] | None:
        """Return the oldest invitation that is not answered yet, as (generation, student); None without one.

        Raises:
            RuntimeError: the store does not answer.
        """
        counter, _ = invitation_keys(self._number, 0)
        count = self._store.add(counter, 0)
        for _ in range(MOST_NEW):
            generation = self._answered + 1
            if generation > count:
                return None
            _, key = invitation_keys(self._number, generation)
            if not self._store.check([key]):
                if self._missing_since is None:
                    self._missing_since = self._clock()
                if self._clock() - self._missing_since <= VOID_SECONDS:
                    return None
                self.answered(generation)
                continue
            try:
                return generation, Identity.decode(self._secret.open(key, self._store.get(key)))
            except ProtocolError as error:
                self._log(f"invitation {generation} at the rendezvous is skipped: {error}")
                self.answered(generation)
        return None

    def answered(self, generation: int) -> None:
        """Note that this invitation needs no further look."""
        self._answered, self._missing_since = generation, None


def _is_number(value: bytes) -> bool:
    return value.isdigit() and len(value) < 19
