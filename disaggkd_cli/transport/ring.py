"""The prefetch ring: the next hidden states are on the way while the student computes.

A feeder thread pulls the next request from the iterator only when a slot is free, so at most `depth` are outstanding
and the request is the credit. Slots are allocated once. Leases come out in the iterator's order, whatever order the
teachers answer in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.errors import RequestsExhausted
from disaggkd_cli.transport.ledger import OutgoingRequest
from disaggkd_cli.transport.pool import TeacherPool
from disaggkd_cli.transport.protocol import Header, Kind, Request, request_body, request_header
from disaggkd_cli.transport.slots import make_slots
from disaggkd_cli.wire import format_of


class Lease:
    """Hidden states of one request, held until `release()`; then the slot is reused and `hidden` must not be read.

    On a GPU, the stream that is current in `take` reads `hidden`, and in `release` has been given all that reads it.

    Attributes:
        request: the request as the iterator gave it.
        hidden: [R, H_t] where the student computes, as the wire format decodes it: a view of the slot where it can.
        stall_seconds: how long `take()` waited for it.
    """

    def __init__(self, ring: HiddenStateRing, outgoing: OutgoingRequest, hidden: Tensor, stall_seconds: float):
        self.request = outgoing.request
        self.request_id = outgoing.request_id
        self.hidden = hidden
        self.stall_seconds = stall_seconds
        self._ring = ring
        self._outgoing = outgoing
        self._released = False

    def release(self) -> None:
        """Give the slot back; that is the credit for the next request. Twice does nothing."""
        if not self._released:
            self._released = True
            self._ring._release(self._outgoing)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class HiddenStateRing:
    """Hidden states of a stream of requests, prefetched from a pool of teachers.

    Args:
        requests: called from the ring's own feeder thread, at most `depth` requests ahead of `take()`.
        depth: number of slots (`transport.ring_depth`). Depth 1 works without overlap.
        slot_rows: most rows that a request may have.
        width: hidden size of the teacher, H_t.
        dtype: name of a wire format (`disaggkd_cli.wire`).
        pool: where teachers are, and on which device the slots lie; several rings may share one.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        depth: int,
        slot_rows: int,
        width: int,
        dtype: str,
        pool: TeacherPool,
    ):
        self.depth = depth
        self.slot_rows = slot_rows
        self.width = width
        self.dtype = dtype
        self._pool = pool
        self._requests = requests
        self._format = format_of(dtype)
        self._slots = make_slots(depth, self._format.payload_bytes(slot_rows, width), pool.cuda)
        self._fill_sum = 0.0
        self._takes = 0
        self._stall_seconds = 0.0
        self._received_bytes = 0
        self._consumer = pool.open_ring(self._slots)
        self._feeder = threading.Thread(target=self._feed, name="ring feeder", daemon=True)
        self._feeder.start()

    def take(self) -> Lease:
        """Return the next lease in order, waiting for it if need be.

        Raises:
            RequestsExhausted: the iterator has ended and every lease was taken.
            TeachersLost: no teacher for `teacher_wait` seconds. Save and exit 75.
            RunError, or whatever the iterator raised.
        """
        begun = time.monotonic()
        ready = self._pool.ready(self._consumer)
        outgoing = self._pool.take(self._consumer)
        self._takes += 1
        self._fill_sum += ready / self.depth
        stall = time.monotonic() - begun
        self._stall_seconds += stall
        if outgoing.slot is not None:
            size = outgoing.ready.body_bytes
            self._received_bytes += size
            outgoing.slot.open_for_reading()
            hidden = self._format.decode(outgoing.slot.buffer[:size], outgoing.ready.rows, self.width)
        else:
            device = self._slots[0].buffer.device
            hidden = torch.empty(0, self.width, dtype=self._format.compute_dtype(), device=device)
        return Lease(self, outgoing, hidden, stall)

    def __iter__(self) -> Iterator[Lease]:
        while True:
            try:
                yield self.take()
            except RequestsExhausted:
                return

    def stats(self) -> dict:
        """Return and restart the figures since the last call.

        `ring_fill` (mean share of slots ready when the trainer came to take), `stall_seconds`, `received_bytes`,
        `takes`, and `teachers`: the pool's totals by teacher.
        """
        figures = {
            "ring_fill": self._fill_sum / self._takes if self._takes else 0.0,
            "stall_seconds": self._stall_seconds,
            "received_bytes": self._received_bytes,
            "takes": self._takes,
            "teachers": self._pool.stats(),
        }
        self._fill_sum, self._takes, self._stall_seconds, self._received_bytes = 0.0, 0, 0.0, 0
        return figures

    def close(self) -> None:
        """Stop pulling requests and drop what is on the way. The pool stays open."""
        self._pool.close_ring(self._consumer)
        self._feeder.join(timeout=5.0)

    def _release(self, outgoing: OutgoingRequest) -> None:
        if outgoing.slot is not None:
            outgoing.slot.give_back()
        self._pool.release(outgoing)

    def _feed(self) -> None:
        try:
            while self._pool.await_credit(self._consumer):
                try:
                    request = next(self._requests)
                except StopIteration:
                    self._pool.complete(self._consumer)
                    return
                self._pool.admit(self._consumer, self._encode(request), needs_slot=request.num_rows > 0)
        except Exception as error:  # whatever the iterator raised is raised again where the trainer takes
            self._pool.fail(error)

    def _encode(self, request: Request) -> OutgoingRequest:
        rows = request.num_rows
        if rows > self.slot_rows:
            raise RunError(f"request {request.request_id} has {rows} rows, a slot holds {self.slot_rows}")
        body = request_body(request)
        header = request_header(request, body, ticket=0)
        ready = Header(
            Kind.READY,
            dtype=self._format.code,
            request_id=request.request_id,
            rows=rows,
            width=self.width,
            token_hash=header.token_hash,
            body_bytes=self._format.payload_bytes(rows, self.width),
        )
        return OutgoingRequest(request, request.num_tokens, header, body, ready)
