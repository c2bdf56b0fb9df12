"""Which request is where: pure bookkeeping, without threads, sockets or clocks. The pool calls it under its lock.

A *consumer* is one ring: a few slots and an order of delivery. A request goes
`waiting` (has a slot, no link) -> `requested` (on a link, under a fresh ticket) -> `receiving` -> `ready` -> `in use`,
and its slot is free again on release. A slot belongs to its request throughout, and a request leaves a dead link only
when the pool reports the link down, which it does after the link's receive call has returned: no transfer can write
into a slot that was handed on.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from disaggkd_cli.transport.errors import StaleReply
from disaggkd_cli.transport.protocol import Header, Request
from disaggkd_cli.transport.slots import Slot


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    READY = "ready"
    IN_USE = "in use"
    DROPPED = "dropped"


@dataclass(eq=False)
class OutgoingRequest:
    """One request of a ring, from admission to release.

    The ring encodes it once: `header` and `body` are what REQUEST sends, `ready` has the fields that its READY must
    have, `work` counts tokens. The ledger keeps the rest: `slot` is None for a request without rows, which needs none;
    `rejected_by` names the teachers whose replies to it were bad, `rejections` counts those replies.
    """

    request: Request
    work: int
    header: Header
    body: Tensor
    ready: Header
    consumer: int = -1
    order: int = -1
    slot: Slot | None = None
    state: State = State.WAITING
    link: int | None = None
    ticket: int = 0
    rejections: int = 0
    rejected_by: set[str] = field(default_factory=set)

    @property
    def request_id(self) -> int:
        """The id that the ring's iterator gave it."""
        return self.request.request_id


@dataclass
class _Consumer:
    depth: int
    free: deque[Slot]
    requests: deque[OutgoingRequest] = field(default_factory=deque)
    in_use: dict[int, OutgoingRequest] = field(default_factory=dict)
    admitted: int = 0
    complete: bool = False


@dataclass
class _LinkLoad:
    teacher: str
    tickets: dict[int, OutgoingRequest] = field(default_factory=dict)
    work: int = 0
    seconds_per_work: float | None = None


class Ledger:
    """All consumers and links of one student rank."""

    def __init__(self) -> None:
        self._consumers: dict[int, _Consumer] = {}
        self._links: dict[int, _LinkLoad] = {}
        self._tickets = itertools.count(1)
        self._consumer_numbers = itertools.count()
        self._waiting: deque[OutgoingRequest] = deque()

    def open_consumer(self, slots: Sequence[Slot]) -> int:
        """Return the number of a new consumer with these slots, all free."""
        if not slots:
            raise ValueError("a ring has at least one slot")
        consumer = next(self._consumer_numbers)
        self._consumers[consumer] = _Consumer(len(slots), deque(slots))
        return consumer

    def close_consumer(self, consumer: int) -> None:
        """Forget a consumer: what waits is dropped, what is on a link is dropped when it arrives."""
        closing = self._consumers.pop(consumer, None)
        for outgoing in closing.requests if closing else ():
            if outgoing.state is State.WAITING:
                self._waiting.remove(outgoing)
            outgoing.state = State.DROPPED

    def is_open(self, consumer: int) -> bool:
        """Return whether a consumer has not been closed."""
        return consumer in self._consumers

    def complete(self, consumer: int) -> None:
        """Note that no further request of this consumer will be admitted."""
        if consumer in self._consumers:
            self._consumers[consumer].complete = True

    def is_finished(self, consumer: int) -> bool:
        """Return whether all requests that a consumer will ever have were taken."""
        ring = self._consumers[consumer]
        return ring.complete and not ring.requests

    def has_credit(self, consumer: int) -> bool:
        """Return whether a request may be admitted now: a slot is free, and fewer than its depth wait to be taken."""
        ring = self._consumers[consumer]
        return bool(ring.free) and len(ring.requests) < ring.depth

    def admit(self, consumer: int, outgoing: OutgoingRequest, needs_slot: bool = True) -> None:
        """Take a request in, next in the consumer's order of delivery, with a slot.

        A request that needs no slot (it has no rows) is ready at once.
        """
        ring = self._consumers[consumer]
        outgoing.consumer, outgoing.order, outgoing.work = consumer, ring.admitted, max(1, outgoing.work)
        ring.admitted += 1
        ring.requests.append(outgoing)
        if needs_slot:
            outgoing.slot = ring.free.popleft()
            self._waiting.append(outgoing)
        else:
            outgoing.state = State.READY

    def link_up(self, link: int, teacher: str) -> None:
        """Add a link over which requests may go to the teacher of this name."""
        self._links[link] = _LinkLoad(teacher)

    def link_down(self, link: int) -> list[OutgoingRequest]:
        """Remove a link whose transfers are over; its open requests wait again, ahead of younger ones. Returns them."""
        load = self._links.pop(link, None)
        if load is None:
            return []
        orphans = [outgoing for outgoing in load.tickets.values() if outgoing.state is not State.DROPPED]
        for outgoing in orphans:
            self._wait_again(outgoing)
        return orphans

    def assign(self) -> OutgoingRequest | None:
        """Give the oldest waiting request to the link that would finish it first, and return it; None if none can go.

        A link's finishing time is its outstanding work and this one's, times its measured seconds per unit of work
        (unmeasured links count as the mean of the others, so equal teachers share by outstanding work alone). Teachers
        that answered the request badly are chosen only when there is no other.
        """
        if not self._waiting or not self._links:
            return None
        outgoing = self._waiting.popleft()
        measured = [load.seconds_per_work for load in self._links.values() if load.seconds_per_work is not None]
        mean = sum(measured) / len(measured) if measured else 1.0

        def finish(item: tuple[int, _LinkLoad]) -> tuple[bool, float, int]:
            link, load = item
            return (
                load.teacher in outgoing.rejected_by,
                (load.work + outgoing.work) * (load.seconds_per_work or mean),
                link,
            )

        link, load = min(self._links.items(), key=finish)
        outgoing.state, outgoing.link, outgoing.ticket = State.REQUESTED, link, next(self._tickets)
        load.tickets[outgoing.ticket] = outgoing
        load.work += outgoing.work
        return outgoing

    def arriving(self, link: int, ticket: int) -> OutgoingRequest:
        """A reply to `ticket` was announced on `link`: return its request, now receiving.

        Raises:
            StaleReply: the ticket is not open on this link.
        """
        load = self._links.get(link)
        outgoing = load.tickets.get(ticket) if load else None
        if outgoing is None or outgoing.state not in (State.REQUESTED, State.DROPPED):
            raise StaleReply(f"a reply to ticket {ticket}, which is not open on this link")
        if outgoing.state is State.REQUESTED:
            outgoing.state = State.RECEIVING
        return outgoing

    def delivered(self, link: int, ticket: int) -> OutgoingRequest:
        """The payload of `ticket` is in its slot and verified."""
        outgoing = self._settle(link, ticket)
        if outgoing.state is State.RECEIVING:
            outgoing.state = State.READY
        return outgoing

    def rejected(self, link: int, ticket: int) -> OutgoingRequest:
        """The reply to `ticket` was corrupt or its forward failed: the request waits again, its rejections counted."""
        outgoing = self._settle(link, ticket)
        if outgoing.state is not State.DROPPED:
            outgoing.rejections += 1
            outgoing.rejected_by.add(self._links[link].teacher)
            self._wait_again(outgoing)
        return outgoing

    def measured(self, link: int, seconds_per_work: float) -> None:
        """Note how fast the link's teacher answered, smoothed over about the last five replies."""
        load = self._links[link]
        old = load.seconds_per_work
        load.seconds_per_work = seconds_per_work if old is None else 0.8 * old + 0.2 * seconds_per_work

    def speed(self, link: int) -> float | None:
        """Return a link's seconds per unit of work; None before the first reply."""
        return self._links[link].seconds_per_work

    def take(self, consumer: int) -> OutgoingRequest | None:
        """Return the next request in the consumer's order, now in use; None while it is not ready."""
        ring = self._consumers[consumer]
        if not ring.requests or ring.requests[0].state is not State.READY:
            return None
        outgoing = ring.requests.popleft()
        outgoing.state = State.IN_USE
        if outgoing.slot is not None:
            ring.in_use[outgoing.order] = outgoing
        return outgoing

    def release(self, outgoing: OutgoingRequest) -> None:
        """Free the slot of a request that was in use. Releasing twice does nothing."""
        ring = self._consumers.get(outgoing.consumer)
        if ring is not None and ring.in_use.pop(outgoing.order, None) is not None:
            ring.free.append(outgoing.slot)

    def outstanding(self, link: int) -> int:
        """Return how many tickets are open on a link."""
        return len(self._links[link].tickets) if link in self._links else 0

    def count(self, consumer: int, *states: State) -> int:
        """Return how many requests of a consumer that have not been taken are in one of `states`."""
        return sum(outgoing.state in states for outgoing in self._consumers[consumer].requests)

    def occupied(self, consumer: int) -> int:
        """Return how many slots of a consumer are not free."""
        ring = self._consumers[consumer]
        return ring.depth - len(ring.free)

    def _settle(self, link: int, ticket: int) -> OutgoingRequest:
        load = self._links.get(link)
        if load is None or ticket not in load.tickets:
            raise StaleReply(f"ticket {ticket} is not open on this link")
        outgoing = load.tickets.pop(ticket)
        load.work -= outgoing.work
        return outgoing

    def _wait_again(self, outgoing: OutgoingRequest) -> None:
        outgoing.state, outgoing.link, outgoing.ticket = State.WAITING, None, 0
        position = 0
        while position < len(self._waiting) and _age(self._waiting[position]) < _age(outgoing):
            position += 1
        self._waiting.insert(position, outgoing)


def _age(outgoing: OutgoingRequest) -> tuple[int, int]:
    return (outgoing.order, outgoing.consumer)
