"""Which request is where: pure bookkeeping, without threads, sockets or clocks. The pool calls it under its lock.

A *consumer* is one ring: `depth` slots and an order of delivery. An entry goes
`waiting` (has a slot, no link) -> `requested` (on a link, under a fresh ticket) -> `receiving` -> `ready` -> `in use`,
and its slot is free again on release. A slot belongs to its entry throughout, and an entry leaves a dead link only
when the pool reports the link down, which it does after the link's receive call has returned: no transfer can write
into a slot that was handed on.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from disaggkd_cli.transport.errors import StaleReply


class State(enum.Enum):
    """Where an entry is."""

    WAITING = "waiting"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    READY = "ready"
    IN_USE = "in use"
    DROPPED = "dropped"


@dataclass
class Entry:
    """One request from admission to release. `slot` is None for a request without rows, which needs none."""

    consumer: int
    order: int
    request_id: int
    work: int
    slot: int | None
    content: Any = None
    state: State = State.WAITING
    link: int | None = None
    ticket: int = 0
    rejections: int = 0
    avoided_link: int | None = None


@dataclass
class _Consumer:
    depth: int
    free: list[int]
    entries: deque[Entry] = field(default_factory=deque)
    in_use: dict[int, Entry] = field(default_factory=dict)
    admitted: int = 0


@dataclass
class _LinkLoad:
    tickets: dict[int, Entry] = field(default_factory=dict)
    work: int = 0
    seconds_per_work: float | None = None


class Ledger:
    """All consumers and links of one student rank."""

    def __init__(self) -> None:
        self._consumers: dict[int, _Consumer] = {}
        self._links: dict[int, _LinkLoad] = {}
        self._tickets = itertools.count(1)
        self._consumer_numbers = itertools.count()
        self._waiting: deque[Entry] = deque()

    def open_consumer(self, depth: int) -> int:
        """Return the number of a new consumer with `depth` free slots."""
        if depth < 1:
            raise ValueError("a ring has at least one slot")
        consumer = next(self._consumer_numbers)
        self._consumers[consumer] = _Consumer(depth, list(range(depth)))
        return consumer

    def close_consumer(self, consumer: int) -> None:
        """Forget a consumer: what waits is dropped, what is on a link is dropped when it arrives."""
        closing = self._consumers.pop(consumer)
        for entry in closing.entries:
            if entry.state is State.WAITING:
                self._waiting.remove(entry)
            entry.state = State.DROPPED

    def has_credit(self, consumer: int) -> bool:
        """Return whether a request may be admitted now: a slot is free, and fewer than `depth` wait to be taken."""
        ring = self._consumers[consumer]
        return bool(ring.free) and len(ring.entries) < ring.depth

    def admit(self, consumer: int, request_id: int, work: int, needs_slot: bool = True, content: Any = None) -> Entry:
        """Take a request in, next in the consumer's order of delivery.

        A request that needs no slot (it has no rows) is ready at once.
        """
        ring = self._consumers[consumer]
        slot = ring.free.pop(0) if needs_slot else None
        entry = Entry(consumer, ring.admitted, request_id, max(1, work), slot, content)
        ring.admitted += 1
        ring.entries.append(entry)
        if needs_slot:
            self._waiting.append(entry)
        else:
            entry.state = State.READY
        return entry

    def link_up(self, link: int) -> None:
        """Add a link over which requests may go."""
        self._links[link] = _LinkLoad()

    def link_down(self, link: int) -> list[Entry]:
        """Remove a link whose transfers are over; its open entries wait again, ahead of younger ones. Returns them."""
        load = self._links.pop(link, None)
        if load is None:
            return []
        orphans = [entry for entry in load.tickets.values() if entry.state is not State.DROPPED]
        for entry in orphans:
            self._wait_again(entry)
        return orphans

    def assign(self) -> Entry | None:
        """Give the oldest waiting entry to the link that would finish it first, and return it; None if none can go.

        A link's finishing time is its outstanding work and this one's, times its measured seconds per unit of work
        (unmeasured links count as the mean of the others, so equal teachers share by outstanding work alone). The link
        that last answered the entry badly is chosen only when there is no other.
        """
        if not self._waiting or not self._links:
            return None
        entry = self._waiting.popleft()
        measured = [load.seconds_per_work for load in self._links.values() if load.seconds_per_work is not None]
        mean = sum(measured) / len(measured) if measured else 1.0

        def finish(item: tuple[int, _LinkLoad]) -> tuple[bool, float, int]:
            link, load = item
            return (link == entry.avoided_link, (load.work + entry.work) * (load.seconds_per_work or mean), link)

        link, load = min(self._links.items(), key=finish)
        entry.state, entry.link, entry.ticket = State.REQUESTED, link, next(self._tickets)
        load.tickets[entry.ticket] = entry
        load.work += entry.work
        return entry

    def arriving(self, link: int, ticket: int) -> Entry:
        """A reply to `ticket` was announced on `link`: return its entry, now receiving.

        Raises:
            StaleReply: the ticket is not open on this link.
        """
        load = self._links.get(link)
        entry = load.tickets.get(ticket) if load else None
        if entry is None or entry.state not in (State.REQUESTED, State.DROPPED):
            raise StaleReply(f"a reply to ticket {ticket}, which is not open on this link")
        if entry.state is State.REQUESTED:
            entry.state = State.RECEIVING
        return entry

    def delivered(self, link: int, ticket: int) -> Entry:
        """The payload of `ticket` is in its slot and verified."""
        entry = self._settle(link, ticket)
        if entry.state is State.RECEIVING:
            entry.state = State.READY
        return entry

    def rejected(self, link: int, ticket: int) -> Entry:
        """The payload of `ticket` was corrupt or its forward failed: the entry waits again, its rejections counted."""
        entry = self._settle(link, ticket)
        if entry.state is not State.DROPPED:
            entry.rejections += 1
            entry.avoided_link = link
            self._wait_again(entry)
        return entry

    def measured(self, link: int, seconds_per_work: float) -> None:
        """Note how fast the link's teacher answered, smoothed over about the last five replies."""
        load = self._links[link]
        old = load.seconds_per_work
        load.seconds_per_work = seconds_per_work if old is None else 0.8 * old + 0.2 * seconds_per_work

    def take(self, consumer: int) -> Entry | None:
        """Return the next entry in the consumer's order, now in use; None while it is not ready."""
        ring = self._consumers[consumer]
        if not ring.entries or ring.entries[0].state is not State.READY:
            return None
        entry = ring.entries.popleft()
        entry.state = State.IN_USE
        if entry.slot is not None:
            ring.in_use[entry.order] = entry
        return entry

    def release(self, entry: Entry) -> None:
        """Free the slot of an entry that was in use. Releasing twice does nothing."""
        ring = self._consumers.get(entry.consumer)
        if ring is not None and ring.in_use.pop(entry.order, None) is not None:
            ring.free.append(entry.slot)

    def outstanding(self, link: int) -> int:
        """Return how many tickets are open on a link."""
        return len(self._links[link].tickets) if link in self._links else 0

    def count(self, consumer: int, *states: State) -> int:
        """Return how many entries of a consumer that have not been taken are in one of `states`."""
        return sum(entry.state in states for entry in self._consumers[consumer].entries)

    def occupied(self, consumer: int) -> int:
        """Return how many slots of a consumer are not free."""
        ring = self._consumers[consumer]
        return ring.depth - len(ring.free)

    def _settle(self, link: int, ticket: int) -> Entry:
        load = self._links.get(link)
        if load is None or ticket not in load.tickets:
            raise StaleReply(f"ticket {ticket} is not open on this link")
        entry = load.tickets.pop(ticket)
        load.work -= entry.work
        return entry

    def _wait_again(self, entry: Entry) -> None:
        entry.state, entry.link, entry.ticket = State.WAITING, None, 0
        position = 0
        while position < len(self._waiting) and _age(self._waiting[position]) < _age(entry):
            position += 1
        self._waiting.insert(position, entry)


def _age(entry: Entry) -> tuple[int, int]:
    return (entry.order, entry.consumer)
