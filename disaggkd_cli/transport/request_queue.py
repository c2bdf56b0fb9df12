"""Which request a teacher answers next: pure bookkeeping, without threads, sockets or clocks.

The teacher's counterpart of the student's ledger. The server calls it under its lock. Students take turns; each link
has a few credits, one for each of its replies that may be computed and not yet taken by its student, so a student that
takes none is passed over while the others go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from disaggkd_cli.transport.protocol import Header, Request

SEND_BUFFERS = 2
"""Credits of a link: one reply travels while the next one is computed."""
MOST_REPLIES = 8
"""Replies of a teacher, over all its links, that are computed and not yet taken; a forward waits for fewer. One forward
fills one at a time, so a few on their way keep it busy; more would cost memory with every student rank that joins."""


@dataclass(frozen=True)
class PendingRequest:
    """A request as it came over link number `link`, under `header`.

    `buffer` is the link's send buffer that its reply may use; -1 until its turn has come.
    """

    link: int
    header: Header
    request: Request
    buffer: int = -1


@dataclass
class _LinkQueue:
    free: deque[int]
    waiting: deque[PendingRequest] = field(default_factory=deque)


class RequestQueue:
    """The requests that wait at one teacher rank, by link.

    Args:
        credits: replies of one link, from its turn on until they are gone, at most.
        most_replies: replies of all links together, at most.
    """

    def __init__(self, credits: int = SEND_BUFFERS, most_replies: int = MOST_REPLIES) -> None:
        if credits < 1 or most_replies < 1:
            raise ValueError("a queue without a credit answers nobody")
        self.credits = credits
        self.most_replies = most_replies
        self._links: dict[int, _LinkQueue] = {}
        self._last: int | None = None
        self._order: list[int] = []

    def link_up(self, link: int) -> None:
        """Add a link, whose turn comes after that of those before it."""
        self._links[link] = _LinkQueue(deque(range(self.credits)))
        self._order.append(link)

    def link_down(self, link: int) -> None:
        """Remove a link: what waits is forgotten, and its replies on their way hold no credit any more."""
        if self._links.pop(link, None) is None:
            return
        place = self._order.index(link)
        if self._last == link:
            # The turn after a link that has left is that of its successor.
            self._last = self._order[place - 1] if len(self._order) > 1 else None
        del self._order[place]

    def push(self, pending: PendingRequest) -> None:
        """Let a request wait behind those of its link.

        Raises:
            KeyError: its link is not up.
        """
        self._links[pending.link].waiting.append(pending)

    def next(self) -> PendingRequest | None:
        """Return the request whose turn it is, with a send buffer of its link; None when none may be answered now.

        The turn goes round: to the first link after the last one served that has a request and a free buffer.
        """
        if self.replies() >= self.most_replies:
            return None
        begin = self._order.index(self._last) + 1 if self._last is not None else 0
        for link in self._order[begin:] + self._order[:begin]:
            queue = self._links[link]
            if queue.waiting and queue.free:
                self._last = link
                return replace(queue.waiting.popleft(), buffer=queue.free.popleft())
        return None

    def reply_gone(self, link: int, buffer: int) -> None:
        """Give a link the credit of a reply back, which its student has taken or which came to nothing."""
        queue = self._links.get(link)
        if queue is None:
            return
        if buffer in queue.free or not 0 <= buffer < self.credits:
            raise ValueError(f"send buffer {buffer} of link {link} is not in use")
        queue.free.append(buffer)

    def replies(self) -> int:
        """Return how many replies are being computed or on their way, over all links."""
        return sum(self.credits - len(queue.free) for queue in self._links.values())

    def open_requests(self, link: int) -> int:
        """Return how many requests of a link wait or have a reply on its way."""
        queue = self._links.get(link)
        return len(queue.waiting) + self.credits - len(queue.free) if queue is not None else 0

    def waiting(self, link: int) -> int:
        """Return how many requests of a link wait for their turn."""
        return len(self._links[link].waiting) if link in self._links else 0

    @property
    def links(self) -> tuple[int, ...]:
        """The links that are up, in the order of their turns."""
        return tuple(self._order)
