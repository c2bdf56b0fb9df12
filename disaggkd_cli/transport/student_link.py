"""One link as the student rank lives it: a thread that forms it and receives headers, one that sends, one that awaits
payloads and verifies them.

The receiving thread owns the link's fate. It alone ends the link, and only after every receive that it started is over
and what came is verified, so a slot that a dying teacher could still write into is never handed to another one.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.authentication import Secret, Session
from disaggkd_cli.transport.backends import agree_on_backend, open_payloads
from disaggkd_cli.transport.checksum import body_problem
from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.cuda import Cuda, device_thread
from disaggkd_cli.transport.errors import (
    ChannelWedged,
    CorruptPayload,
    ForwardFailed,
    IncompatiblePeer,
    LinkLost,
    ProtocolError,
)
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.ledger import OutgoingRequest
from disaggkd_cli.transport.link import STUDENT, Link, form_link
from disaggkd_cli.transport.pair import Transfer, forming_seconds
from disaggkd_cli.transport.payloads import Arrived
from disaggkd_cli.transport.protocol import PING_SECONDS, Header, Kind, StopReason, stop_reason
from disaggkd_cli.transport.rendezvous import await_acceptance, invite_teacher, link_key
from disaggkd_cli.wire import format_of_code

STRIKES = 2
"""How many bad replies (corrupt, non-finite, failed forward) end a teacher's service to this student."""
FORGIVEN_AFTER = 1000
"""Good replies in a row that wipe out a teacher's strikes: a stray bit in a week is no reason to lose it."""


@dataclass
class TeacherRecord:
    """What the student rank knows about one teacher rank; outlives its links.

    Attributes:
        lost_at: when its last link ended; `alive_at_loss`: its counter of heartbeats at the first look after that.
        looked_at: when that counter was last read.
    """

    number: int
    identity: Identity
    linked: bool = False
    joined: int = 0
    blocked: str = ""
    refused: bool = False
    strikes: int = 0
    good_in_a_row: int = 0
    requests: int = 0
    rows: int = 0
    received_bytes: int = 0
    idle_share: float = 0.0
    backend: str = ""
    nccl_failed: bool = False
    other_bits: bool = False
    lost_at: float | None = None
    alive_at_loss: int | None = None
    looked_at: float = 0.0


class LinkOwner(Protocol):
    """The student rank that a link belongs to, as the link needs it. The link's threads call; none holds a lock then.

    Attributes:
        identity: what the student says in the handshake.
        timeout: seconds for any one transfer, and for one forward of the teacher.
        bind: where pairs listen.
        secret: of the run.
        cuda: where slots lie; None for the CPU.
        connections: whence the link's connection to the store was borrowed.
    """

    identity: Identity
    timeout: float
    bind: str
    secret: Secret
    cuda: Cuda | None
    connections: StoreConnections

    def next_link_number(self) -> int:
        """Return a number that no other link has."""

    def joined(self, link: StudentLink) -> None:
        """The handshake is done; requests may go out from now on."""

    def lost(self, link: StudentLink, cause: str) -> None:
        """The link is over, and every transfer on it."""

    def arriving(self, link: StudentLink, ticket: int) -> OutgoingRequest:
        """Return the request to whose `ticket` a reply is announced. Raises `StaleReply`."""

    def delivered(self, link: StudentLink, ticket: int, seconds_per_work: float) -> None:
        """The reply to `ticket` lies verified in its slot."""

    def rejected(self, link: StudentLink, outgoing: OutgoingRequest, error: Exception) -> None:
        """The reply was bad."""

    def fail(self, error: BaseException) -> None:
        """End the run with `error`."""


class StudentLink:
    """The link to one teacher, from the invitation until it is lost.

    Args:
        owner: the student rank.
        record: of the teacher; outlives the link, whose threads alone write its figures while the link is up.
        store: borrowed from the owner's connections until the link has formed.

    Attributes:
        outbox: requests to be sent; a `StopReason` is the sending thread's last word, None ends it without one.
    """

    def __init__(self, owner: LinkOwner, record: TeacherRecord, store: dist.Store):
        self._owner = owner
        self.record = record
        self.outbox: queue.SimpleQueue[OutgoingRequest | StopReason | None] = queue.SimpleQueue()
        self.number = owner.next_link_number()
        self.thread = device_thread(owner.cuda, self._live, f"link to {record.identity.role}")
        self._store: dist.Store | None = store
        self._name = f"link {owner.identity.role} - {record.identity.role}"
        self._last_reply = 0.0
        self._sent_at: dict[int, float] = {}
        self._arriving: queue.SimpleQueue[tuple[Header, OutgoingRequest, Transfer] | None] = queue.SimpleQueue()
        self._announced = self._verified = 0  # payloads for the thread for arrivals; each written by one thread
        self._payload_lost = ""

    def start(self) -> None:
        """Form the link, and live it, in threads of its own."""
        self.thread.start()

    def hang_up(self, reason: StopReason) -> None:
        """Ask the sending thread to say STOP; the teacher answers with STOP, which ends the receiving thread."""
        self.outbox.put(reason)

    def _live(self) -> None:
        cause = ""
        link = arrivals = None
        wedged = False
        try:
            link = self._form()
            sender = device_thread(self._owner.cuda, self._send_loop, f"send: {self._name}", (link,))
            arrivals = device_thread(self._owner.cuda, self._arrival_loop, f"arrivals: {self._name}", (link,))
            self._owner.joined(self)
            arrivals.start()
            sender.start()
            cause = self._receive_loop(link)
        except IncompatiblePeer as error:
            self.record.refused = True
            cause = self.record.blocked = str(error)
        except ProtocolError as error:
            cause = self.record.blocked = f"{self._name}: {error}"
        except LinkLost as error:
            cause = self._payload_lost or str(error)
        except ChannelWedged as error:
            # The link keeps its open requests: a slot that may still be written is given to nobody.
            wedged = True
            self._owner.fail(error)
        except Exception as error:  # a fault of ours must not leave the trainer waiting: say it there
            cause = f"{self._name}: {type(error).__name__}: {error}"
            self._owner.fail(error)
        finally:
            if self._store is not None:
                self._owner.connections.lose()
            if arrivals is not None:
                self.outbox.put(None)
                link.close()
                self._arriving.put(None)
                arrivals.join()
            if not wedged:
                self._owner.lost(self, cause)

    def _form(self) -> Link:
        identity = self._owner.identity
        if self.record.nccl_failed and identity.backend == "auto":
            identity = replace(identity, backend="gloo")
        generation = invite_teacher(self._store, self.record.number, identity, self._owner.secret)
        await_acceptance(self._store, self.record.number, generation, forming_seconds(self._owner.timeout))
        link = form_link(
            self._store,
            link_key(self.record.number, generation),
            STUDENT,
            name=self._name,
            generation=generation,
            run_id=self._owner.identity.run_id,
            timeout=self._owner.timeout,
            forming_timeout=forming_seconds(self._owner.timeout),
            bind=self._owner.bind,
            secret=self._owner.secret,
        )
        link.send_text(Kind.HELLO, identity.encode())
        answer = _first_answer(link)
        if answer.kind not in (Kind.WELCOME, Kind.REFUSAL):
            raise ProtocolError(f"{answer.kind.name} instead of WELCOME")
        text = link.receive_text(answer)
        if answer.kind is Kind.REFUSAL:
            raise IncompatiblePeer(text.decode(errors="replace"))
        teacher = Identity.decode(text)
        compare_identities(identity, teacher)
        if teacher.probe != self.record.identity.probe:
            raise ProtocolError(f"{teacher.role} announced another probe than it brings")
        nccl = agree_on_backend(identity, teacher) == "nccl"
        try:
            link.payloads = open_payloads(
                link, identity, teacher, STUDENT, self._store, self._owner.cuda,
                forming_timeout=forming_seconds(self._owner.timeout), bind=self._owner.bind,
            )  # fmt: skip
        except LinkLost:
            self.record.nccl_failed = nccl
            link.close()
            raise
        self._owner.connections.give_back(self._store)
        self._store = None
        self.record.backend = link.payloads.backend
        return link

    def _send_loop(self, link: Link) -> None:
        try:
            while True:
                try:
                    item = self.outbox.get(timeout=min(self._owner.timeout / 4, PING_SECONDS))
                except queue.Empty:
                    link.send_header(Header(Kind.PING))
                    continue
                if item is None:
                    return
                if isinstance(item, StopReason):
                    link.send_header(Header(Kind.STOP, flags=item))
                    return
                while not item.slot.is_free(PING_SECONDS):
                    link.send_header(Header(Kind.PING))
                self._sent_at[item.ticket] = time.monotonic()
                link.send_request(replace(item.header, ticket=item.ticket), item.body)
        except LinkLost:
            # The receiving thread sees the same broken pair and ends the link.
            link.close()

    def _receive_loop(self, link: Link) -> str:
        while True:
            header = link.receive_header()
            if header.kind is Kind.PING:
                self.record.idle_share = header.flags / 1000
                self._check_progress(header)
            elif header.kind is Kind.READY:
                self.record.idle_share = header.flags / 1000
                self._receive_reply(link, header)
            elif header.kind is Kind.ERROR:
                text = link.receive_text(header).decode(errors="replace")
                outgoing = self._owner.arriving(self, header.ticket)
                self._strike(outgoing, ForwardFailed(f"{self.record.identity.role}: {text}"))
            elif header.kind is Kind.STOP:
                return f"{self._name}: ended ({stop_reason(header).name.lower().replace('_', ' ')})"
            else:
                raise ProtocolError(f"{header.kind.name} from a teacher")

    def _receive_reply(self, link: Link, header: Header) -> None:
        outgoing = self._owner.arriving(self, header.ticket)
        check_ready(header, outgoing.ready)
        size, body = header.body_bytes, link.inline_body()
        if body is None:
            transfer = link.payloads.start_receive(outgoing.slot, size)
        elif link.carries(size):
            outgoing.slot.host_buffer[:size].copy_(body)
            if self._verified == self._announced:
                self._verify(link, header, outgoing)  # the thread for arrivals rests: spare the way through it
                return
            transfer = Arrived()
        else:
            raise ProtocolError("a payload came behind its READY, where it goes from GPU to GPU")
        self._announced += 1
        self._arriving.put((header, outgoing, transfer))

    def _arrival_loop(self, link: Link) -> None:
        # A thread of its own, so that the next READY is looked at and its receive started while this payload travels,
        # and the next payload travels while this one is read through.
        try:
            while (item := self._arriving.get()) is not None:
                header, outgoing, transfer = item
                try:
                    transfer.wait()
                except LinkLost as error:
                    # The receiving thread sees the same broken pair and ends the link, after this thread.
                    self._payload_lost = self._payload_lost or str(error)
                    link.close()
                else:
                    self._verify(link, header, outgoing)
                self._verified += 1
        except Exception as error:  # a fault of ours must not leave the trainer waiting: say it there
            self._owner.fail(error)

    def _verify(self, link: Link, header: Header, outgoing: OutgoingRequest) -> None:
        payloads = link.payloads
        now = time.monotonic()
        self.record.received_bytes += outgoing.ready.body_bytes
        seconds = now - max(self._last_reply, self._sent_at.pop(header.ticket, now))
        self._last_reply = now
        with payloads.inspecting():
            payload = payloads.received(outgoing.slot, outgoing.ready.body_bytes)
            problem = payload_problem(header, payload, link.session)
        if problem:
            self._strike(
                outgoing, CorruptPayload(f"{self.record.identity.role}: request {outgoing.request_id}: {problem}")
            )
            return
        payloads.commit(outgoing.slot, outgoing.ready.body_bytes)
        self.record.good_in_a_row += 1
        if self.record.good_in_a_row >= FORGIVEN_AFTER:
            self.record.strikes = 0
        self.record.requests += 1
        self.record.rows += header.rows
        self._owner.delivered(self, header.ticket, seconds / outgoing.work)

    def _strike(self, outgoing: OutgoingRequest, error: Exception) -> None:
        self.record.strikes += 1
        self.record.good_in_a_row = 0
        self._sent_at.pop(outgoing.ticket, None)
        self._owner.rejected(self, outgoing, error)
        if self.record.strikes >= STRIKES:
            self.record.blocked = f"quarantined after {self.record.strikes} bad replies, the last: {error}"
            self.hang_up(StopReason.QUARANTINED)

    def _check_progress(self, ping: Header) -> None:
        limit = self._owner.timeout
        if ping.busy_ms > limit * 1000:
            raise LinkLost(f"{self._name}: one forward has been running for {ping.busy_ms / 1000:.0f} s "
                           f"(transport.timeout={limit:g})")  # fmt: skip
        oldest = min(tuple(self._sent_at.values()), default=None)
        silent = ping.busy_ms == 0 and ping.queued == 0
        if silent and oldest is not None and time.monotonic() - max(oldest, self._last_reply) > limit:
            raise LinkLost(f"{self._name}: the teacher says it is idle, but owes a reply for more than {limit:g} s")


def _first_answer(link: Link) -> Header:
    """Return the teacher's first header, which proves that it is the teacher.

    Raises:
        LinkLost: it does not; a teacher in whose place somebody else spoke may link again.
        ProtocolError: it cannot be read, where no secret tells a teacher from somebody else.
    """
    try:
        return link.receive_header()
    except ProtocolError as error:
        if link.session:
            raise LinkLost(f"{link.name}: somebody else answered in the teacher's place: {error}") from error
        raise


def check_ready(header: Header, expected: Header) -> None:
    """Return quietly when READY announces exactly what the request's slot expects.

    Raises:
        ProtocolError: names the field with both values. The payload is then never received.
    """
    for name in ("request_id", "rows", "width", "dtype", "token_hash", "body_bytes"):
        here, there = getattr(expected, name), getattr(header, name)
        if here != there:
            raise ProtocolError(
                f"the reply to request {expected.request_id} announces {name.replace('_', ' ')} {there}, "
                f"the student expects {here}"
            )


def payload_problem(header: Header, payload: Tensor, session: Session | None = None) -> str:
    """Return what is wrong with the payload of a READY that was checked, or an empty text."""
    if problem := body_problem(payload, header.checksum, header.body_tag, session):
        return f"the payload: {problem}"
    if not format_of_code(header.dtype).is_finite(payload, header.rows, header.width):
        return "the hidden states are not finite"
    return ""
