"""One link as the teacher lives it: a thread that receives requests, and one that sends replies and heartbeats."""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.backends import agree_on_backend, open_payloads
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.errors import ChannelWedged, IncompatiblePeer, LinkLost, ProtocolError
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.link import TEACHER, Link, form_link
from disaggkd_cli.transport.pair import Transfer, forming_seconds
from disaggkd_cli.transport.protocol import (
    PING_SECONDS,
    Header,
    Kind,
    Request,
    StopReason,
    decode_request,
    request_integers,
    stop_reason,
)
from disaggkd_cli.transport.rendezvous import accept_invitation, link_key
from disaggkd_cli.transport.wire import payload_checksum

if TYPE_CHECKING:
    from disaggkd_cli.transport.server import TeacherServer

SEND_BUFFERS = 2


@dataclass(frozen=True)
class PendingRequest:
    """A request with the header it came under."""

    header: Header
    request: Request


@dataclass(frozen=True)
class Reply:
    """What the sending thread sends: a READY, still without checksum, and its payload in send buffer `buffer`, or an
    ERROR with its text."""

    header: Header
    payload: Tensor | None = None
    buffer: int = -1
    text: bytes = b""


@dataclass(frozen=True)
class _Travelling:
    """A payload on its way; `reply` holds on to its memory."""

    transfer: Transfer
    reply: Reply


class TeacherLink:
    """The link to one student rank, from its invitation until it is lost."""

    def __init__(
        self, server: TeacherServer, generation: int, student: Identity, connections: StoreConnections,
        store: dist.Store, number: int,
    ):  # fmt: skip
        self.server = server
        self.student = student
        self.pending: deque[PendingRequest] = deque()
        self.outbox: queue.SimpleQueue[Reply | StopReason | None] = queue.SimpleQueue()
        self.free_buffers: deque[int] = deque(range(SEND_BUFFERS))
        self.thread = threading.Thread(target=self._live, name=f"link to {student.role}", daemon=True)
        self._buffers: dict[int, Tensor] = {}
        self._travelling: _Travelling | None = None
        self._generation = generation
        self._connections = connections
        self._store: dist.Store | None = store
        self._number = number
        self._name = f"link {server.identity.role} - {student.role}"

    def start(self) -> None:
        self.thread.start()

    def hang_up(self, reason: StopReason) -> None:
        """Have the sending thread say STOP as its last word."""
        self.outbox.put(reason)

    def buffer_of(self, index: int, size: int) -> Tensor:
        """Return send buffer `index`, of at least `size` bytes where the teacher computes; it is the link's until
        `forget_buffer`."""
        if index not in self._buffers:
            self._buffers[index] = self.server.buffers.take(size)
        return self._buffers[index]

    def forget_buffer(self, index: int) -> None:
        """Give the memory of send buffer `index` back, if it took any: its reply has gone."""
        if index in self._buffers:
            self.server.buffers.give_back(self._buffers.pop(index))

    def _live(self) -> None:
        cause, stop, sender, link = "", None, None, None
        try:
            link = self._form()
            sender = threading.Thread(target=self._send_loop, args=(link,), name=f"send: {self._name}", daemon=True)
            self.server.link_formed(self)
            sender.start()
            stop = self._receive_loop(link)
            self.outbox.put(StopReason.LINK_CLOSED)
            sender.join(self.server.timeout)
        except (LinkLost, IncompatiblePeer) as error:
            cause = str(error)
        except Exception as error:  # a link is disposable: whatever broke it is said, and the other links go on
            cause = f"{self._name}: {type(error).__name__}: {error}"
        finally:
            self.outbox.put(None)
            if self._store is not None:
                self._connections.lose()
            if link is not None:
                link.close()
            self.server.link_ended(self, stop, cause)

    def _form(self) -> Link:
        accept_invitation(self._store, self._number, self._generation)
        key = link_key(self._number, self._generation)
        link = form_link(
            self._store,
            key,
            TEACHER,
            name=self._name,
            generation=self._generation,
            run_id=self.student.run_id,
            timeout=self.server.timeout,
            forming_timeout=forming_seconds(self.server.timeout),
            bind=self.server.bind,
        )
        hello = link.receive_header()
        if hello.kind is not Kind.HELLO:
            raise ProtocolError(f"{hello.kind.name} instead of HELLO")
        self.student = Identity.decode(link.receive_text(hello))
        try:
            compare_identities(self.server.identity, self.student)
            agree_on_backend(self.student, self.server.identity)
        except IncompatiblePeer as error:
            link.send_text(Kind.REFUSAL, str(error).encode())
            raise
        link.send_text(Kind.WELCOME, self.server.identity.encode())
        server = self.server
        link.payloads = open_payloads(
            link, self.student, server.identity, TEACHER, key, self._store, server.cuda,
            forming_timeout=forming_seconds(server.timeout), bind=server.bind,
        )  # fmt: skip
        self._connections.give_back(self._store)
        self._store = None
        return link

    def _receive_loop(self, link: Link) -> StopReason:
        while True:
            header = link.receive_header()
            if header.kind is Kind.REQUEST:
                body = link.receive_request_body(request_integers(header))
                self.server.enqueue(self, PendingRequest(header, decode_request(header, body)))
            elif header.kind is Kind.STOP:
                return stop_reason(header)
            elif header.kind is not Kind.PING:
                raise ProtocolError(f"{header.kind.name} from a student")

    def _send_loop(self, link: Link) -> None:
        try:
            while self._send_next(link):
                pass
        except LinkLost:
            # The receiving thread sees the same broken pair and ends the link.
            link.close()
        except ChannelWedged as error:
            link.close()
            self.server.fail(error)
        finally:
            self._abandon(link)

    def _send_next(self, link: Link) -> bool:
        """Send what comes next; False once the last word is said."""
        if self.outbox.empty():
            self._await_arrival()
        try:
            item = self.outbox.get(timeout=min(self.server.timeout / 4, PING_SECONDS))
        except queue.Empty:
            link.send_header(self.server.ping(self))
            return True
        if isinstance(item, Reply) and item.payload is not None:
            self._send_payload(link, item)
            return True
        self._await_arrival()
        if item is None:
            return False
        if isinstance(item, StopReason):
            link.send_header(Header(Kind.STOP, flags=item))
            return False
        link.send_text(Kind.ERROR, item.text, ticket=item.header.ticket)
        return True

    def _send_payload(self, link: Link, reply: Reply) -> None:
        """Start READY and the payload, behind the payload before it, which may still travel; await that one.

        So the next payload is under way whenever the student posts its receive, without this thread's help.
        """
        staged = link.payloads.stage(reply.payload)
        checked = self.server.checksum and link.payloads.checksums
        ready = link.start_header(replace(reply.header, checksum=payload_checksum(staged) if checked else 0))
        if not link.payloads.posted_ahead:
            ready.wait()
            self._await_arrival()
        staged = self.server.faults.at_payload(staged, ready)
        before, self._travelling = self._travelling, _Travelling(link.payloads.start(staged), reply)
        self._finish(before)
        ready.wait()

    def _await_arrival(self) -> None:
        """Wait for the payload on its way, if there is one, and give its buffer back."""
        travelling, self._travelling = self._travelling, None
        self._finish(travelling)

    def _finish(self, travelling: _Travelling | None) -> None:
        if travelling is not None:
            travelling.transfer.wait()
            self.server.buffer_free(self, travelling.reply.buffer)

    def _abandon(self, link: Link) -> None:
        """See to it that nothing of a lost link is read any more before its memory may be used again."""
        try:
            if self._travelling is not None:
                self._travelling.transfer.wait()
        except LinkLost:
            link.close()
        except ChannelWedged as error:
            self.server.fail(error)
