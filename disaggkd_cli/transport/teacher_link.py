"""One link as the teacher lives it: a thread that receives requests, and one that sends replies and heartbeats."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.answers import Reply
from disaggkd_cli.transport.authentication import Secret
from disaggkd_cli.transport.backends import agree_on_backend, open_payloads
from disaggkd_cli.transport.checksum import body_checks
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.cuda import Cuda, device_thread
from disaggkd_cli.transport.errors import ChannelWedged, IncompatiblePeer, LinkLost, ProtocolError
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.link import TEACHER, Link, form_link
from disaggkd_cli.transport.pair import Transfer, forming_seconds
from disaggkd_cli.transport.payloads import Arrived
from disaggkd_cli.transport.protocol import (
    PING_SECONDS,
    Header,
    Kind,
    StopReason,
    decode_request,
    request_integers,
    stop_reason,
)
from disaggkd_cli.transport.rendezvous import accept_invitation, link_key
from disaggkd_cli.transport.request_queue import PendingRequest
from disaggkd_cli.transport.send_buffers import SendBuffers


class LinkOwner(Protocol):
    """The teacher that a link belongs to, as the link needs it. The link's threads call; none holds a lock then.

    Attributes:
        identity: what the teacher says in the handshake.
        timeout: seconds for any one transfer.
        bind: where pairs listen.
        secret: of the run.
        checksum: whether a READY carries the checksum, or the tag, of its payload.
        cuda: where payloads lie; None for the CPU.
        buffers: memory for replies.
        faults: ordered by tests.
    """

    identity: Identity
    timeout: float
    bind: str
    secret: Secret
    checksum: bool
    cuda: Cuda | None
    buffers: SendBuffers
    faults: Faults

    def link_formed(self, link: TeacherLink) -> None:
        """The handshake is done; requests may come from now on."""

    def link_ended(self, link: TeacherLink, stop: StopReason | None, cause: str) -> None:
        """The link is over: the student hung up for the reason `stop`, or it was lost because of `cause`."""

    def enqueue(self, pending: PendingRequest) -> None:
        """A request has come."""

    def reply_gone(self, link: int, buffer: int) -> None:
        """The payload in send buffer `buffer` of link number `link` has been taken."""

    def ping(self, link: int) -> Header:
        """Return the PING for link number `link`."""

    def fail(self, error: Exception) -> None:
        """End the teacher with `error`."""


class TeacherLink:
    """The link to one student rank, from its invitation until it is lost.

    Args:
        owner: the teacher.
        number: of the link, among all of the owner's.
        generation: of the invitation.
        student: who invited.
        connections, store: `store` is borrowed from `connections` until the link has formed.
        teacher: the number under which the teacher is announced.

    Attributes:
        outbox: what the sending thread sends next; a `StopReason` is its last word, None ends it without one.
    """

    def __init__(
        self,
        owner: LinkOwner,
        number: int,
        generation: int,
        student: Identity,
        connections: StoreConnections,
        store: dist.Store,
        teacher: int,
    ):
        self.number = number
        self.student = student
        self.outbox: queue.SimpleQueue[Reply | StopReason | None] = queue.SimpleQueue()
        self.thread = device_thread(owner.cuda, self._live, f"link to {student.role}")
        self._owner = owner
        self._buffers: dict[int, Tensor] = {}
        self._travelling: tuple[Transfer, Reply] | None = None
        self._connections = connections
        self._store: dist.Store | None = store
        self._teacher = teacher
        self._generation = generation
        self._name = f"link {owner.identity.role} - {student.role}"

    def start(self) -> None:
        """Form the link, and live it, in threads of its own."""
        self.thread.start()

    def hang_up(self, reason: StopReason) -> None:
        """Have the sending thread say STOP as its last word."""
        self.outbox.put(reason)

    def buffer_of(self, index: int, size: int) -> Tensor:
        """Return the memory of send buffer `index`, of at least `size` bytes where the teacher computes.

        It is the link's until `forget_buffer`; called by the thread that computes, which holds the buffer's credit.
        """
        if index not in self._buffers:
            self._buffers[index] = self._owner.buffers.take(size)
        return self._buffers[index]

    def forget_buffer(self, index: int) -> None:
        """Give the memory of send buffer `index` back, if it took any: its reply has gone."""
        if index in self._buffers:
            self._owner.buffers.give_back(self._buffers.pop(index))

    def _live(self) -> None:
        cause, stop, sender, link = "", None, None, None
        try:
            link = self._form()
            sender = device_thread(self._owner.cuda, self._send_loop, f"send: {self._name}", (link,))
            self._owner.link_formed(self)
            sender.start()
            stop = self._receive_loop(link)
            self.outbox.put(StopReason.LINK_CLOSED)
            sender.join(self._owner.timeout)
        except (LinkLost, IncompatiblePeer) as error:
            cause = str(error)
        except Exception as error:  # a link is disposable: whatever broke it is logged, and the other links go on
            cause = f"{self._name}: {type(error).__name__}: {error}"
        finally:
            self.outbox.put(None)
            if self._store is not None:
                self._connections.lose()
            if link is not None:
                link.close()
            self._owner.link_ended(self, stop, cause)

    def _form(self) -> Link:
        accept_invitation(self._store, self._teacher, self._generation)
        link = form_link(
            self._store,
            link_key(self._teacher, self._generation),
            TEACHER,
            name=self._name,
            generation=self._generation,
            run_id=self.student.run_id,
            timeout=self._owner.timeout,
            forming_timeout=forming_seconds(self._owner.timeout),
            bind=self._owner.bind,
            secret=self._owner.secret,
        )
        hello = link.receive_header()
        if hello.kind is not Kind.HELLO:
            raise ProtocolError(f"{hello.kind.name} instead of HELLO")
        self.student = Identity.decode(link.receive_text(hello))
        try:
            compare_identities(self._owner.identity, self.student)
            agree_on_backend(self.student, self._owner.identity)
        except IncompatiblePeer as error:
            link.send_text(Kind.REFUSAL, str(error).encode())
            raise
        link.send_text(Kind.WELCOME, self._owner.identity.encode())
        link.payloads = open_payloads(
            link,
            self.student,
            self._owner.identity,
            TEACHER,
            self._store,
            self._owner.cuda,
            forming_timeout=forming_seconds(self._owner.timeout),
            bind=self._owner.bind,
        )
        self._connections.give_back(self._store)
        self._store = None
        return link

    def _receive_loop(self, link: Link) -> StopReason:
        while True:
            header = link.receive_header()
            if header.kind is Kind.REQUEST:
                body = link.receive_request_body(request_integers(header))
                self._owner.enqueue(PendingRequest(self.number, header, decode_request(header, body)))
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
            self._owner.fail(error)
        finally:
            self._abandon(link)

    def _send_next(self, link: Link) -> bool:
        """Send what comes next; False once the last word is said."""
        if self.outbox.empty():
            self._await_arrival()
        try:
            item = self.outbox.get(timeout=min(self._owner.timeout / 4, PING_SECONDS))
        except queue.Empty:
            link.send_header(self._owner.ping(self.number))
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

        A small payload goes with its READY.

        So the next payload is under way whenever the student posts its receive, without this thread's help.
        """
        staged = link.payloads.stage(reply.payload)
        checked = self._owner.checksum and link.payloads.checksums
        header = replace(reply.header, **(body_checks(staged, link.session) if checked else {}))
        if header.body_bytes == staged.numel() and link.carries(staged.numel()):
            staged = self._owner.faults.at_payload(staged, Arrived())
            before, self._travelling = self._travelling, (link.start_message(header, staged), reply)
            self._finish(before)
            return
        ready = link.start_header(header)
        if not link.payloads.posted_ahead:
            ready.wait()
            self._await_arrival()
        staged = self._owner.faults.at_payload(staged, ready)
        before, self._travelling = self._travelling, (link.payloads.start(staged), reply)
        self._finish(before)
        ready.wait()

    def _await_arrival(self) -> None:
        """Wait for the payload on its way, if there is one, and give its buffer back."""
        travelling, self._travelling = self._travelling, None
        self._finish(travelling)

    def _finish(self, travelling: tuple[Transfer, Reply] | None) -> None:
        if travelling is not None:
            travelling[0].wait()
            self._owner.reply_gone(self.number, travelling[1].buffer)

    def _abandon(self, link: Link) -> None:
        """See to it that nothing of a lost link is read any more before its memory may be used again."""
        try:
            if self._travelling is not None:
                self._travelling[0].wait()
        except LinkLost:
            link.close()
        except ChannelWedged as error:
            self._owner.fail(error)
