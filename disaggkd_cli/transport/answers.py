"""Answers of a teacher: the forward of one request or of several together, and the reply that carries each result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disaggkd_cli.transport.backends import cuda_of
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.merge import merge_requests, split_states
from disaggkd_cli.transport.meter import BusyMeter
from disaggkd_cli.transport.protocol import Header, Kind, Request
from disaggkd_cli.transport.teacher_link import PendingRequest, Reply, TeacherLink
from disaggkd_cli.transport.wire import encode_payload, needs_no_buffer, payload_bytes, wire_code

MOST_FAILURES = 3
"""After this many failed forwards in a row the teacher gives up (the fault is then its own), and after this many
failed merged ones it stops merging."""


@dataclass(frozen=True)
class ScheduledRequest:
    """A request whose turn it is: the link that it came over, and the link's send buffer that its reply may use."""

    link: TeacherLink
    pending: PendingRequest
    buffer: int


class Answerer:
    """Computes the replies of one teacher rank, in the thread that calls it.

    Attributes:
        merge_tokens: most tokens of several requests that one forward may take together; 0 never merges.
        failures: how many forwards in a row failed until now.
        last_error: why the last failed forward failed.
    """

    def __init__(
        self,
        identity: Identity,
        forward: Callable[[Request], Tensor],
        *,
        device: torch.device,
        merge_tokens: int,
        faults: Faults,
        log: Callable[[str], None],
    ):
        self.merge_tokens = merge_tokens
        self.meter = BusyMeter()
        self.requests = self.rows = self.forwards = self.failures = 0
        self.last_error = ""
        self._identity = identity
        self._forward = forward
        self._device, self._cuda = device, cuda_of(device)
        self._log = log
        self._faults = faults
        self._merge_failures = 0

    def answer(self, group: Sequence[ScheduledRequest]) -> Iterator[tuple[ScheduledRequest, Reply]]:
        """Yield the reply to each turn of a group, as soon as it is there; a failed forward's is an ERROR.

        A forward of several requests that fails is done again one request at a time.
        """
        if len(group) > 1:
            payloads = self._attempt(group)
            if payloads is not None:
                self._merge_failures = 0
                for turn, payload in zip(group, payloads, strict=True):
                    yield turn, self._ready(turn, payload)
                return
            self._log(
                f"{self._identity.role}: a forward of {len(group)} requests together failed, "
                f"each is done alone: {self.last_error}"
            )
            self._count_merge_failure()
        for turn in group:
            payloads = self._attempt([turn])
            if payloads is None:
                self.failures += 1
                request_id = turn.pending.request.request_id
                self._log(f"{self._identity.role}: forward of request {request_id} failed: {self.last_error}")
                yield turn, Reply(turn.pending.header, text=self.last_error.encode())
            else:
                self.failures = 0
                yield turn, self._ready(turn, payloads[0])

    def _attempt(self, group: Sequence[ScheduledRequest]) -> list[Tensor] | None:
        """Return the payload of each turn after one forward of all; None when something raised."""
        self.meter.begin()
        self.forwards += 1
        try:
            requests = [turn.pending.request for turn in group]
            merged = merge_requests(requests) if len(requests) > 1 else requests[0]
            states = self._faults.at_forward(self._forward(merged))
            expected = (merged.num_rows, self._identity.hidden_size)
            if tuple(states.shape) != expected:
                raise ValueError(f"the forward returned {tuple(states.shape)}, the request asks for {expected}")
            parts = split_states(states, requests)
            payloads = [self._encode(turn, part) for turn, part in zip(group, parts, strict=True)]
            if self._cuda is not None:
                self._cuda.finish()  # READY means complete, and the meter counts the forward, not its launch
            return payloads
        except Exception as error:  # said to the student, and raised by the server when it happens again and again
            self.last_error = f"{type(error).__name__}: {error}"
            return None
        finally:
            self.meter.end()

    def _encode(self, turn: ScheduledRequest, states: Tensor) -> Tensor:
        name = self._identity.wire_dtype
        size = 0 if needs_no_buffer(states, name, self._device) else payload_bytes(*states.shape, name)
        return encode_payload(states, name, turn.link.buffer_of(turn.buffer, size))

    def _ready(self, turn: ScheduledRequest, payload: Tensor) -> Reply:
        header, request = turn.pending.header, turn.pending.request
        self.requests += 1
        self.rows += request.num_rows
        ready = Header(
            Kind.READY,
            dtype=wire_code(self._identity.wire_dtype),
            flags=round(1000 * self.meter.idle_share()),
            ticket=header.ticket,
            request_id=request.request_id,
            rows=request.num_rows,
            width=self._identity.hidden_size,
            token_hash=header.token_hash,
            body_bytes=payload.numel(),
        )
        return Reply(self._faults.at_ready(ready), payload, turn.buffer)

    def _count_merge_failure(self) -> None:
        self._merge_failures += 1
        if self._merge_failures >= MOST_FAILURES:
            self.merge_tokens = 0
            self._log(
                f"{self._identity.role}: merging requests is off from here on, since {self._merge_failures} merged "
                "forwards in a row failed; lower teacher.merge_tokens"
            )
