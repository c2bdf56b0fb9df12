"""What goes between neighbouring stages of a pipeline, over links of the transport that all point the same way round.

Stage k has a link to stage k + 1, and the last one to the first. Over each go, in order:
  REQUEST [body] payload   a request, and the hidden states [B, S, H] that leave the stage
  READY payload            from the last stage: the hidden states [R, H] of the rows that were asked for
  ERROR text               the forward of a request failed somewhere; the stages after it hand that on
  STOP teacher leaving     a stage has been told to stop; the first one hears it and serves no longer
  STOP link closed         from the first stage: no further request; handed round, then everybody ends
  PING                     nothing else to say
Each way has a thread of its own, so receiving, computing and sending overlap.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.checksum import body_checks, body_problem
from disaggkd_cli.transport.cuda import Cuda, device_thread
from disaggkd_cli.transport.errors import ChannelWedged, LinkLost, ProtocolError
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.link import Link
from disaggkd_cli.transport.protocol import (
    PING_SECONDS,
    Header,
    Kind,
    Request,
    StopReason,
    decode_request,
    request_body,
    request_header,
    request_integers,
    stop_reason,
)
from disaggkd_cli.transport.slots import Slot, make_slots

_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Item:
    """A request on its way through the stages.

    Attributes:
        ticket: its number in this replica.
        request: None once the last stage has answered, or a forward failed.
        states: what leaves a stage: [B, S, H], or [R, H] from the last one; None for what has not begun.
        slot: where received states lie; given back once they have been read.
        error: why its forward failed.
    """

    ticket: int
    request: Request | None = None
    states: Tensor | None = None
    slot: Slot | None = None
    error: str = ""


class StageOutput:
    """The link to the next stage.

    Args:
        link: with its payload channel; used by nobody else.
        checksum: `transport.checksum`.
        faults: of this stage, for tests.
        cuda: where the states lie; None for the CPU.
        lost: called once when the link is gone, unless it was closed here.
    """

    def __init__(
        self,
        link: Link,
        *,
        checksum: bool,
        faults: Faults,
        lost: Callable[[RunError], None],
        cuda: Cuda | None = None,
    ) -> None:
        self._link = link
        self._checksum = checksum and link.payloads.checksums
        self._faults = faults
        self._lost = lost
        self._outbox: queue.SimpleQueue[Item | StopReason] = queue.SimpleQueue()
        self._thread = device_thread(cuda, self._send_all, f"send: {link.name}")

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Item | StopReason) -> None:
        """Have something sent after what was put before; states (contiguous, complete) stay untouched."""
        self._outbox.put(item)

    def close(self) -> None:
        """Send what was put, up to STOP link closed, which must have been; then let go of the link."""
        self._thread.join(_CLOSE_SECONDS)
        self._link.close()

    def drop(self) -> None:
        """Let go of the link at once; the next stage sees that this one is gone."""
        self._link.close()

    def _send_all(self) -> None:
        try:
            while True:
                try:
                    item = self._outbox.get(timeout=min(self._link.timeout / 4, PING_SECONDS))
                except queue.Empty:
                    self._link.send_header(Header(Kind.PING))
                    continue
                if isinstance(item, StopReason):
                    self._link.send_header(Header(Kind.STOP, flags=item))
                    if item is StopReason.LINK_CLOSED:
                        return
                elif item.error:
                    self._link.send_text(Kind.ERROR, item.error.encode(), ticket=item.ticket)
                else:
                    self._send(item)
        except (LinkLost, ChannelWedged) as error:
            self._lost(RunError(str(error)))

    def _send(self, item: Item) -> None:
        payloads = self._link.payloads
        staged = payloads.stage(item.states.detach().reshape(-1).view(torch.uint8))
        checks = body_checks(staged, self._link.session) if self._checksum else {}
        width = item.states.shape[-1]
        if item.request is None:
            rows, size = item.states.shape[0], staged.numel()
            header, body = Header(Kind.READY, ticket=item.ticket, rows=rows, width=width, body_bytes=size), None
        else:
            body = request_body(item.request)
            header = replace(request_header(item.request, body, item.ticket), width=width)
        sent = self._link.start_header(replace(header, **checks))
        if body is not None:
            self._link.send_request_body(body)
        staged = self._faults.at_payload(staged, sent)
        sent.wait()
        payloads.start(staged).wait()


class StageInput:
    """The link from the stage before.

    Args:
        link: with its payload channel; used by nobody else.
        width: H_t.
        dtype: of the hidden states between stages.
        cuda: where they are received; None for the CPU.
        hear: called with each item, its states received and verified, and each STOP, from a thread of this object.
        lost: called once when the link is gone.
    """

    def __init__(
        self,
        link: Link,
        *,
        width: int,
        dtype: torch.dtype,
        cuda: Cuda | None,
        hear: Callable[[Item | StopReason], None],
        lost: Callable[[RunError], None],
    ) -> None:
        self._link = link
        self._width = width
        self._dtype = dtype
        self._cuda = cuda
        self._hear = hear
        self._lost = lost
        self._free: deque[Slot] = deque()
        self._thread = device_thread(cuda, self._receive_all, f"receive: {link.name}")

    def start(self) -> None:
        self._thread.start()

    def give_back(self, slot: Slot) -> None:
        """Let a slot be used again; the calling thread's stream has read it."""
        slot.give_back()
        self._free.append(slot)

    def close(self) -> None:
        """Let go of the link once STOP link closed was heard."""
        self._thread.join(_CLOSE_SECONDS)
        self._link.close()

    def drop(self) -> None:
        """Let go of the link at once."""
        self._link.close()

    def _receive_all(self) -> None:
        try:
            while True:
                header = self._link.receive_header()
                if header.kind is Kind.STOP:
                    self._hear(stop_reason(header))
                    if stop_reason(header) is StopReason.LINK_CLOSED:
                        return
                elif header.kind is Kind.ERROR:
                    text = self._link.receive_text(header).decode(errors="replace")
                    self._hear(Item(header.ticket, error=text))
                elif header.kind in (Kind.REQUEST, Kind.READY):
                    self._hear(self._receive(header))
                elif header.kind is not Kind.PING:
                    raise ProtocolError(f"{self._link.name}: {header.kind.name} between stages")
        except Exception as error:  # the thread is what keeps the replica going: whatever ends it ends the replica
            self._lost(RunError(str(error)) if isinstance(error, RunError) else RunError(f"{self._link.name}: {error}"))

    def _receive(self, header: Header) -> Item:
        request = None
        shape: tuple[int, ...] = (header.rows, self._width)
        if header.kind is Kind.REQUEST:
            request = decode_request(header, self._link.receive_request_body(request_integers(header)))
            shape = (header.batch, header.sequence, self._width)
        size = self._dtype.itemsize
        for length in shape:
            size *= length
        if header.width != self._width or (request is None and header.body_bytes != size):
            raise ProtocolError(f"{self._link.name}: states of width {header.width}, not {self._width} ({shape})")
        payloads = self._link.payloads
        slot = self._slot(size)
        payloads.start_receive(slot, size).wait()
        with payloads.inspecting():
            problem = body_problem(payloads.received(slot, size), header.checksum, header.body_tag, self._link.session)
        if problem:
            self._free.append(slot)
            return Item(header.ticket, error=f"hidden states arrived damaged between two stages: {problem}")
        payloads.commit(slot, size)
        return Item(header.ticket, request, slot.buffer[:size].view(self._dtype).view(shape), slot)

    def _slot(self, size: int) -> Slot:
        """A free slot of enough bytes. There are never more than requests inside the replica."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot.buffer.numel() >= size and slot.is_free(self._link.timeout):
                return slot
        return make_slots(1, size, self._cuda)[0]
