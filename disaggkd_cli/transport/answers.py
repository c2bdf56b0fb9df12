"""Answers of a teacher: the forward of a request, and the reply that carries its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disaggkd_cli.transport.cuda import cuda_of
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.meter import BusyMeter
from disaggkd_cli.transport.protocol import Header, Kind, Request
from disaggkd_cli.transport.request_queue import PendingRequest
from disaggkd_cli.wire import format_of

MOST_FAILURES = 3
"""After this many failed forwards in a row the teacher gives up: the fault is then its own."""


@dataclass(frozen=True)
class Reply:
    """What a link sends for a request: a READY, still without checksum, and its payload, which may lie in the link's
    send buffer `buffer`; or, without a payload, an ERROR with its text."""

    header: Header
    payload: Tensor | None = None
    buffer: int = -1
    text: bytes = b""


class Answerer:
    """Computes the replies of one teacher rank, in the threads that call it.

    Args:
        identity: `hidden_size` and `wire_dtype` define the payload.
        forward: see `serve`.
        buffer_of: from a request and a size in bytes to the memory that its reply may be written into.
        log: called with one line when a forward fails.

    Attributes:
        requests, rows: answered so far.
        failures: how many forwards in a row failed until now.
        last_error: why the last failed forward failed.
    """

    def __init__(
        self,
        identity: Identity,
        forward: Callable[[Request], Tensor],
        *,
        device: torch.device,
        buffer_of: Callable[[PendingRequest, int], Tensor],
        faults: Faults,
        log: Callable[[str], None],
    ):
        self.meter = BusyMeter()
        self._guard = threading.Lock()
        self.requests = self.rows = self.failures = 0
        self.last_error = ""
        self._identity = identity
        self._format = format_of(identity.wire_dtype)
        self._forward = forward
        self._buffer_of = buffer_of
        self._device, self._cuda = device, cuda_of(device)
        self._log = log
        self._faults = faults

    def answer(self, pending: PendingRequest) -> Reply:
        """Return the reply to a request whose turn has come; a failed forward's is an ERROR."""
        with self._guard:
            begun = self.meter.begin()
        try:
            payload = self._payload(pending)
        except Exception as error:  # the student is told, and the server raises when it happens again and again
            with self._guard:
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"
            request_id = pending.request.request_id
            self._log(f"{self._identity.role}: forward of request {request_id} failed: {self.last_error}")
            return Reply(pending.header, buffer=pending.buffer, text=self.last_error.encode())
        finally:
            with self._guard:
                self.meter.end(begun)
        return self._ready(pending, payload)

    def _payload(self, pending: PendingRequest) -> Tensor:
        states = self._faults.at_forward(self._forward(pending.request))
        expected = (pending.request.num_rows, self._identity.hidden_size)
        if tuple(states.shape) != expected:
            raise ValueError(f"the forward returned {tuple(states.shape)}, the request asks for {expected}")
        needs_buffer = self._format.needs_buffer(states, self._device)
        size = self._format.payload_bytes(*expected) if needs_buffer else 0
        payload = self._format.payload_of(states, self._buffer_of(pending, size))
        if self._cuda is not None:
            self._cuda.finish()  # READY means complete, and the meter counts the forward, not its launch
        return payload

    def _ready(self, pending: PendingRequest, payload: Tensor) -> Reply:
        request = pending.request
        with self._guard:
            self.failures = 0
            self.requests += 1
            self.rows += request.num_rows
        ready = Header(
            Kind.READY,
            dtype=self._format.code,
            flags=round(1000 * self.meter.idle_share()),
            ticket=pending.header.ticket,
            request_id=request.request_id,
            rows=request.num_rows,
            width=self._identity.hidden_size,
            token_hash=pending.header.token_hash,
            body_bytes=payload.numel(),
        )
        return Reply(self._faults.at_ready(ready), payload, pending.buffer)
