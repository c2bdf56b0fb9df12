"""One link as the student rank lives it: a thread that forms it and receives headers, one that sends, one that awaits
payloads and verifies them.

The receiving thread owns the link's fate. It alone ends the link, and only after every receive that it started is over
and what came is verified, so a slot that a dying teacher could still write into is never handed to another one.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.backends import agree_on_backend, open_payloads
from disaggkd_cli.transport.errors import (
    ChannelWedged,
    CorruptPayload,
    ForwardFailed,
    IncompatiblePeer,
    LinkLost,
    ProtocolError,
)
from disaggkd_cli.transport.identity import Identity, compare_identities
from disaggkd_cli.transport.ledger import Entry
from disaggkd_cli.transport.link import STUDENT, Link, form_link
from disaggkd_cli.transport.pair import Transfer, forming_seconds
from disaggkd_cli.transport.payloads import PayloadChannel
from disaggkd_cli.transport.protocol import PING_SECONDS, Header, Kind, Request, StopReason, stop_reason
from disaggkd_cli.transport.rendezvous import await_acceptance, invite_teacher, link_key
from disaggkd_cli.transport.slots import Slot
from disaggkd_cli.transport.wire import payload_bytes, payload_checksum, payload_is_finite, wire_code

if TYPE_CHECKING:
    from disaggkd_cli.transport.pool import TeacherPool

STRIKES = 2
"""How many bad replies (corrupt, non-finite, failed forward) end a teacher's service to this student."""
FORGIVEN_AFTER = 1000
"""Good replies in a row that wipe out a teacher's strikes: a stray bit in a week is no reason to lose it."""


@dataclass
class OutgoingRequest:
    """A request as the links need it: encoded once, with the slot its reply goes into."""

    request: Request
    header: Header
    body: Tensor
    slot: Slot | None
    width: int
    dtype: str

    @property
    def payload_bytes(self) -> int:
        """How much of the slot the reply fills, exactly."""
        return payload_bytes(self.request.num_rows, self.width, self.dtype)


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
    lost_at: float | None = None
    alive_at_loss: int | None = None
    looked_at: float = 0.0


class StudentLink:
    """The link to one teacher, from the invitation until it is lost. `start()` returns at once."""

    def __init__(self, pool: TeacherPool, record: TeacherRecord, store: dist.Store):
        self.pool = pool
        self.record = record
        self.outbox: queue.SimpleQueue[Entry | StopReason | None] = queue.SimpleQueue()
        self.number = pool.next_link_number()
        self.thread = threading.Thread(target=self._live, name=f"link to {record.identity.role}", daemon=True)
        self._store: dist.Store | None = store
        self._name = f"link {pool.identity.role} - {record.identity.role}"
        self._last_reply = 0.0
        self._sent_at: dict[int, float] = {}
        self._arriving: queue.SimpleQueue[tuple[Header, Entry, Transfer] | None] = queue.SimpleQueue()
        self._payload_lost = ""

    def start(self) -> None:
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
            sender = threading.Thread(target=self._send_loop, args=(link,), name=f"send: {self._name}", daemon=True)
            arrivals = threading.Thread(
                target=self._arrival_loop, args=(link,), name=f"arrivals: {self._name}", daemon=True
            )
            self.pool.link_formed(self)
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
            self.pool.fail(error)
        except Exception as error:  # a fault of ours must not leave the trainer waiting: say it there
            cause = f"{self._name}: {type(error).__name__}: {error}"
            self.pool.fail(error)
        finally:
            if self._store is not None:
                self.pool.connections.lose()
            if arrivals is not None:
                self.outbox.put(None)
                link.close()
                self._arriving.put(None)
                arrivals.join()
            if not wedged:
                self.pool.link_ended(self, cause)

    def _form(self) -> Link:
        identity = self.pool.identity
        if self.record.nccl_failed and identity.backend == "auto":
            identity = replace(identity, backend="gloo")
        generation = invite_teacher(self._store, self.record.number, identity)
        await_acceptance(self._store, self.record.number, generation, forming_seconds(self.pool.timeout))
        key = link_key(self.record.number, generation)
        link = form_link(
            self._store,
            key,
            STUDENT,
            name=self._name,
            generation=generation,
            run_id=self.pool.identity.run_id,
            timeout=self.pool.timeout,
            forming_timeout=forming_seconds(self.pool.timeout),
            bind=self.pool.bind,
        )
        link.send_text(Kind.HELLO, identity.encode())
        answer = link.receive_header()
        if answer.kind not in (Kind.WELCOME, Kind.REFUSAL):
            raise ProtocolError(f"{answer.kind.name} instead of WELCOME")
        text = link.receive_text(answer)
        if answer.kind is Kind.REFUSAL:
            raise IncompatiblePeer(text.decode(errors="replace"))
        teacher = Identity.decode(text)
        compare_identities(identity, teacher)
        nccl = agree_on_backend(identity, teacher) == "nccl"
        try:
            link.payloads = open_payloads(
                link, identity, teacher, STUDENT, key, self._store, self.pool.cuda,
                forming_timeout=forming_seconds(self.pool.timeout), bind=self.pool.bind,
            )  # fmt: skip
        except LinkLost:
            self.record.nccl_failed = nccl
            link.close()
            raise
        self.pool.connections.give_back(self._store)
        self._store = None
        self.record.backend = link.payloads.backend
        return link

    def _send_loop(self, link: Link) -> None:
        try:
            while True:
                try:
                    item = self.outbox.get(timeout=min(self.pool.timeout / 4, PING_SECONDS))
                except queue.Empty:
                    link.send_header(Header(Kind.PING))
                    continue
                if item is None:
                    return
                if isinstance(item, StopReason):
                    link.send_header(Header(Kind.STOP, flags=item))
                    return
                outgoing: OutgoingRequest = item.content
                while not outgoing.slot.is_free(PING_SECONDS):
                    link.send_header(Header(Kind.PING))
                self._sent_at[item.ticket] = time.monotonic()
                link.send_header(outgoing_header(outgoing, item.ticket))
                link.send_request_body(outgoing.body)
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
                entry = self.pool.arriving(self, header.ticket)
                self._strike(entry, ForwardFailed(f"{self.record.identity.role}: {text}"))
            elif header.kind is Kind.STOP:
                return f"{self._name}: ended ({stop_reason(header).name.lower().replace('_', ' ')})"
            else:
                raise ProtocolError(f"{header.kind.name} from a teacher")

    def _receive_reply(self, link: Link, header: Header) -> None:
        entry = self.pool.arriving(self, header.ticket)
        outgoing: OutgoingRequest = entry.content
        check_ready(header, outgoing)
        self._arriving.put((header, entry, link.payloads.start_receive(outgoing.slot, outgoing.payload_bytes)))

    def _arrival_loop(self, link: Link) -> None:
        # A thread of its own, so that the next READY is looked at and its receive started while this payload travels,
        # and the next payload travels while this one is read through.
        try:
            while (item := self._arriving.get()) is not None:
                header, entry, transfer = item
                try:
                    transfer.wait()
                except LinkLost as error:
                    # The receiving thread sees the same broken pair and ends the link, after this thread.
                    self._payload_lost = self._payload_lost or str(error)
                    link.close()
                else:
                    self._verify(link.payloads, header, entry)
        except Exception as error:  # a fault of ours must not leave the trainer waiting: say it there
            self.pool.fail(error)

    def _verify(self, payloads: PayloadChannel, header: Header, entry: Entry) -> None:
        outgoing: OutgoingRequest = entry.content
        now = time.monotonic()
        self.record.received_bytes += outgoing.payload_bytes
        seconds = now - max(self._last_reply, self._sent_at.pop(header.ticket, now))
        self._last_reply = now
        with payloads.inspecting():
            problem = payload_problem(header, payloads.received(outgoing.slot, outgoing.payload_bytes), outgoing)
        if problem:
            self._strike(entry, CorruptPayload(f"{self.record.identity.role}: request {entry.request_id}: {problem}"))
            return
        payloads.commit(outgoing.slot, outgoing.payload_bytes)
        self.record.good_in_a_row += 1
        if self.record.good_in_a_row >= FORGIVEN_AFTER:
            self.record.strikes = 0
        self.record.requests += 1
        self.record.rows += header.rows
        self.pool.delivered(self, header.ticket, seconds / entry.work)

    def _strike(self, entry: Entry, error: Exception) -> None:
        self.record.strikes += 1
        self.record.good_in_a_row = 0
        self._sent_at.pop(entry.ticket, None)
        self.pool.rejected(self, entry, error)
        if self.record.strikes >= STRIKES:
            self.record.blocked = f"quarantined after {self.record.strikes} bad replies, the last: {error}"
            self.hang_up(StopReason.QUARANTINED)

    def _check_progress(self, ping: Header) -> None:
        limit = self.pool.timeout
        if ping.busy_ms > limit * 1000:
            raise LinkLost(f"{self._name}: one forward has been running for {ping.busy_ms / 1000:.0f} s "
                           f"(transport.timeout={limit:g})")  # fmt: skip
        oldest = min(tuple(self._sent_at.values()), default=None)
        silent = ping.busy_ms == 0 and ping.queued == 0
        if silent and oldest is not None and time.monotonic() - max(oldest, self._last_reply) > limit:
            raise LinkLost(f"{self._name}: the teacher says it is idle, but owes a reply for more than {limit:g} s")


def outgoing_header(outgoing: OutgoingRequest, ticket: int) -> Header:
    """Return the REQUEST header of an outgoing request under a fresh ticket."""
    return replace(outgoing.header, ticket=ticket)


def check_ready(header: Header, outgoing: OutgoingRequest) -> None:
    """Return quietly when READY announces exactly what the outgoing request's slot expects.

    Raises:
        ProtocolError: names the field with both values. The payload is then never received.
    """
    expected = {
        "request_id": outgoing.request.request_id,
        "rows": outgoing.request.num_rows,
        "width": outgoing.width,
        "dtype": wire_code(outgoing.dtype),
        "token_hash": outgoing.header.token_hash,
        "body_bytes": outgoing.payload_bytes,
    }
    for name, value in expected.items():
        if getattr(header, name) != value:
            raise ProtocolError(
                f"the reply to request {outgoing.request.request_id} announces {name.replace('_', ' ')} "
                f"{getattr(header, name)}, the student expects {value}"
            )


def payload_problem(header: Header, payload: Tensor, outgoing: OutgoingRequest) -> str:
    """Return what is wrong with a received payload, or an empty text."""
    if header.checksum and payload_checksum(payload) != header.checksum:
        return "the payload's checksum is wrong"
    if not payload_is_finite(payload, header.rows, header.width, outgoing.dtype):
        return "the hidden states are not finite"
    return ""
