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
from disaggkd_cli.transport.ledger import Entry, State
from disaggkd_cli.transport.pool import TeacherPool
from disaggkd_cli.transport.protocol import Request, request_body, request_header
from disaggkd_cli.transport.slots import make_slots
from disaggkd_cli.transport.student_link import OutgoingRequest
from disaggkd_cli.transport.wire import WIRE_DTYPES, decode_payload, payload_bytes


class Lease:
    """Hidden states of one request, held until `release()`; then the slot is reused and `hidden` must not be read.

    On a GPU, the stream that is current in `take` reads `hidden`, and in `release` has been given all that reads it.

    Attributes:
        request: the request as the iterator gave it.
        hidden: [R, H_t] in the wire dtype where the student computes, a view of the slot (float8: a fresh bfloat16
            tensor).
        stall_seconds: how long `take()` waited for it.
    """

    def __init__(self, ring: HiddenStateRing, entry: Entry, request: Request, hidden: Tensor, stall_seconds: float):
        self.request = request
        self.request_id = request.request_id
        self.hidden = hidden
        self.stall_seconds = stall_seconds
        self._ring = ring
        self._entry = entry
        self._released = False

    def release(self) -> None:
        """Give the slot back; that is the credit for the next request. Twice does nothing."""
        if not self._released:
            self._released = True
            self._ring._release(self._entry)

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
        dtype: wire dtype, a name of `WIRE_DTYPES`.
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
        self._slots = make_slots(depth, payload_bytes(slot_rows, width, dtype), pool.cuda)
        self._exhausted = False
        self._closed = False
        self._fill_sum = 0.0
        self._takes = 0
        self._stall_seconds = 0.0
        self._received_bytes = 0
        with pool.changed:
            self._consumer = pool.ledger.open_consumer(depth)
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
        pool = self._pool
        with pool.changed:
            if self._closed:
                raise RunError("the ring is closed")
            self._fill_sum += pool.ledger.count(self._consumer, State.READY) / self.depth
            self._takes += 1
            while (entry := pool.ledger.take(self._consumer)) is None:
                if self._exhausted and not pool.ledger.count(self._consumer, *State):
                    self._takes -= 1
                    raise RequestsExhausted("the ring's requests have all been taken")
                pool.check()
                pool.changed.wait(0.2)
            pool.changed.notify_all()
        stall = time.monotonic() - begun
        self._stall_seconds += stall
        outgoing: OutgoingRequest = entry.content
        self._received_bytes += outgoing.payload_bytes
        rows = outgoing.request.num_rows
        if outgoing.slot is not None:
            outgoing.slot.open_for_reading()
            hidden = decode_payload(outgoing.slot.buffer[: outgoing.payload_bytes], rows, self.width, self.dtype)
        else:
            dtype = torch.bfloat16 if self.dtype == "float8" else WIRE_DTYPES[self.dtype]
            hidden = torch.empty(0, self.width, dtype=dtype, device=self._slots[0].buffer.device)
        return Lease(self, entry, outgoing.request, hidden, stall)

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
        with self._pool.changed:
            if self._closed:
                return
            self._closed = True
            self._pool.ledger.close_consumer(self._consumer)
            self._pool.changed.notify_all()
        self._feeder.join(timeout=5.0)

    def _release(self, entry: Entry) -> None:
        if entry.content.slot is not None:
            entry.content.slot.give_back()
        with self._pool.changed:
            self._pool.ledger.release(entry)
            self._pool.changed.notify_all()

    def _feed(self) -> None:
        pool = self._pool
        try:
            while True:
                with pool.changed:
                    pool.changed.wait_for(lambda: self._closed or pool.ledger.has_credit(self._consumer))
                    if self._closed:
                        return
                try:
                    request = next(self._requests)
                except StopIteration:
                    break
                if request.num_rows > self.slot_rows:
                    name, rows = request.request_id, request.num_rows
                    raise RunError(f"request {name} has {rows} rows, a slot holds {self.slot_rows}")
                body = request_body(request)
                header = request_header(request, body, ticket=0)
                with pool.changed:
                    if self._closed:
                        return
                    needs_slot = request.num_rows > 0
                    entry = pool.ledger.admit(self._consumer, request.request_id, request.num_tokens, needs_slot)
                    slot = self._slots[entry.slot] if needs_slot else None
                    entry.content = OutgoingRequest(request, header, body, slot, self.width, self.dtype)
                    pool.dispatch()
                    pool.changed.notify_all()
        except Exception as error:  # whatever the iterator raised is raised again where the trainer takes
            pool.fail(error)
            return
        with pool.changed:
            self._exhausted = True
            pool.changed.notify_all()
