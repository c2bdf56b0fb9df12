"""Messages between two ranks of a replica, over a link of their own: both directions, each with a thread.

A rank that has nothing to say says PING, so whoever listens knows within the link's timeout that a peer is gone or
stalled, however long neither has work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.link import Link
from disaggkd_cli.transport.protocol import PING_SECONDS, Header, Kind, StopReason, request_integers, stop_reason

_CLOSE_SECONDS = 5.0


class Conversation:
    """The link to one other rank of the replica.

    Args:
        link: formed; used by nobody else.
        hear: called with each message and its body, in the order they were said, from a thread of this conversation.
        lost: called once when the peer is gone, unless the conversation was closed here.
    """

    def __init__(
        self, link: Link, hear: Callable[[Header, Tensor | None], None], lost: Callable[[LinkLost], None]
    ) -> None:
        self._link = link
        self._hear = hear
        self._lost = lost
        self._outbox: queue.SimpleQueue[tuple[Header, Tensor | None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"{verb}: {link.name}", daemon=True)
            for verb, target in (("say", self._say_all), ("hear", self._hear_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def say(self, header: Header, body: Tensor | None = None) -> None:
        """Have a message sent after those before it; `body` (int32) stays untouched."""
        self._outbox.put((header, body))

    def close(self) -> None:
        """Send what has been said, hear the other's last word (a STOP, link closed), then let go of the link.

        Each of the two takes `_CLOSE_SECONDS` at most; a peer that is gone is not waited for.
        """
        self._closed = True
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._link.close()

    def drop(self) -> None:
        """Let go of the link at once; the peer sees that this side is gone."""
        self._closed = True
        self._outbox.put(None)
        self._link.close()

    def _say_all(self) -> None:
        try:
            while True:
                try:
                    item = self._outbox.get(timeout=min(self._link.timeout / 4, PING_SECONDS))
                except queue.Empty:
                    item = (Header(Kind.PING), None)
                if item is None:
                    return
                header, body = item
                self._link.send_header(header)
                if body is not None:
                    self._link.send_request_body(body)
        except LinkLost as error:
            self._end(error)

    def _hear_all(self) -> None:
        try:
            while True:
                header = self._link.receive_header()
                if header.kind is Kind.PING:
                    continue
                body = self._link.receive_request_body(request_integers(header)) if header.body_bytes else None
                self._hear(header, body)
                if header.kind is Kind.STOP and stop_reason(header) is StopReason.LINK_CLOSED:
                    return
        except LinkLost as error:
            self._end(error)

    def _end(self, error: LinkLost) -> None:
        if not self._closed:
            self._closed = True
            self._lost(error)
