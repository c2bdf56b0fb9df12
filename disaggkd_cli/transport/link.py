"""A link: the process group of two between one student rank and one teacher replica. Only this file moves tensors.

A link is disposable. Any error closes it; the two sides then form another under a new generation. Each direction is
used by one thread at a time: one sends, one receives.

The seam for NCCL: headers and request bodies always travel over the gloo pair (`control`). Payloads go through
`send_payload` / `receive_payload`, which today use the same pair; a payload group formed beside it (same store prefix,
posted only after a validated READY) goes there and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.errors import LinkLost, ProtocolError
from disaggkd_cli.transport.protocol import HEADER_BYTES, MAX_TEXT_BYTES, Header, Kind, run_number
from disaggkd_cli.transport.wire import payload_checksum

STUDENT, TEACHER = 0, 1
CHUNK_BYTES = 64 * 2**20
"""Longer messages travel in pieces, so that the timeout bounds a piece and not a whole payload on a slow network."""



class Link:
    """One side of a pair group.

    Args:
        group: a process group of two; this side has rank `side`.
        name: what messages call this link, naming both sides.
        generation: the number both sides agreed on; a header of another one is refused.
        run_id: headers of another run are refused.
        timeout: seconds that any one send or receive may take.

    Attributes:
        control: the group; None once closed. Read from outside only to measure gloo itself.
    """

    def __init__(self, group: dist.ProcessGroup, side: int, name: str, generation: int, run_id: str, timeout: float):
        self.name = name
        self.generation = generation
        self.timeout = timeout
        self.received_bytes = 0
        self.sent_bytes = 0
        self.control = group
        self._peer = 1 - side
        self._run = run_number(run_id)
        self._header_in = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    def send_header(self, header: Header) -> None:
        """Send one header, stamped with this link's run and generation."""
        stamped = replace(header, run=self._run, generation=self.generation)
        self._send(torch.frombuffer(bytearray(stamped.encode()), dtype=torch.uint8), f"a {header.kind.name} header")

    def receive_header(self) -> Header:
        """Receive and validate one header.

        Raises:
            LinkLost: nothing came within the timeout, or the peer is gone.
            ProtocolError: what came is not a header of this run and link.
        """
        self._receive(self._header_in, "a header")
        header = Header.decode(self._header_in.numpy().tobytes())
        if header.run != self._run:
            raise ProtocolError(f"{self.name}: a header of another run (number {header.run:x}, ours is {self._run:x})")
        if header.generation != self.generation:
            raise ProtocolError(f"{self.name}: a header of generation {header.generation}, not {self.generation}")
        return header

    def send_text(self, kind: Kind, text: bytes, **header_fields: int) -> None:
        """Send a header of `kind` and `text` as its body (cut at `MAX_TEXT_BYTES`)."""
        body = torch.frombuffer(bytearray(text[:MAX_TEXT_BYTES] or b" "), dtype=torch.uint8)
        fields = {"body_bytes": body.numel(), "checksum": payload_checksum(body), **header_fields}
        self.send_header(Header(kind, **fields))
        self._send(body, "a text")

    def receive_text(self, header: Header) -> bytes:
        """Receive the text that `header` announced."""
        if not 0 < header.body_bytes <= MAX_TEXT_BYTES:
            raise ProtocolError(f"{self.name}: a text of {header.body_bytes} bytes announced, {MAX_TEXT_BYTES} allowed")
        body = torch.empty(header.body_bytes, dtype=torch.uint8)
        self._receive(body, "a text")
        if payload_checksum(body) != header.checksum:
            raise ProtocolError(f"{self.name}: a text arrived damaged")
        return body.numpy().tobytes()

    def send_request_body(self, body: Tensor) -> None:
        """Send the int32 body of a request whose header has gone before."""
        self._send(body.view(torch.uint8), "a request")

    def receive_request_body(self, integers: int) -> Tensor:
        """Receive the `integers` int32 that a REQUEST header announced."""
        body = torch.empty(integers, dtype=torch.int32)
        self._receive(body.view(torch.uint8), "a request")
        return body

    def send_payload(self, payload: Tensor) -> None:
        """Send hidden states whose READY header has gone before. `payload` is uint8 and stays untouched meanwhile."""
        self._send(payload, "a payload")

    def receive_payload(self, buffer: Tensor) -> None:
        """Receive hidden states straight into `buffer`, uint8 of exactly the size that READY announced.

        When this returns or raises, the transfer is over: nothing writes into `buffer` any more.
        """
        self._receive(buffer, "a payload")

    def close(self) -> None:
        """Drop the group. Sockets close once no thread is inside a call on it."""
        self.control = None

    def _send(self, message: Tensor, what: str) -> None:
        self._move(message, "send", what, lambda group, piece: group.send([piece], self._peer, 0))
        self.sent_bytes += message.numel()

    def _receive(self, buffer: Tensor, what: str) -> None:
        self._move(buffer, "receive", what, lambda group, piece: group.recv([piece], self._peer, 0))
        self.received_bytes += buffer.numel()

    def _move(self, message: Tensor, verb: str, what: str, start: Callable) -> None:
        group = self.control
        if group is None:
            raise LinkLost(f"{self.name}: the link is closed, cannot {verb} {what}")
        begun = time.monotonic()
        try:
            for piece in message.split(CHUNK_BYTES):
                start(group, piece).wait()
        except RuntimeError as error:
            self.close()
            seconds = time.monotonic() - begun
            cause = "the peer stalled" if seconds >= self.timeout * 0.9 else "the peer is gone"
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise LinkLost(
                f"{self.name}: could not {verb} {what} within {seconds:.1f} s (timeout {self.timeout:g} s), {cause}: "
                f"{first_line}"
            ) from error


def form_link(
    store: dist.Store,
    key: str,
    side: int,
    *,
    name: str,
    generation: int,
    run_id: str = "",
    timeout: float = 60.0,
    forming_timeout: float | None = None,
    bind: str = "loopback",
) -> Link:
    """Form the pair group `key` with the peer, which calls this with the other `side`.

    Args:
        store: a connection of the calling thread's own (a store serves one blocking call at a time).
        side: `STUDENT` or `TEACHER`.
        forming_timeout: seconds to wait for the peer to come; default `timeout`.
        bind: `loopback`, an address or host name of this machine to listen on, or `auto` (gloo chooses, and honours
            `GLOO_SOCKET_IFNAME`).

    Raises:
        LinkLost: the peer did not come in time.
    """
    wait = timedelta(seconds=forming_timeout or timeout)
    store.set_timeout(wait)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [_device(bind)]
    options._timeout = wait
    options._threads = 2
    try:
        group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), side, 2, options)
    except RuntimeError as error:
        raise LinkLost(f"{name}: the peer did not come to form the link within {wait.total_seconds():g} s") from error
    group._set_default_timeout(timedelta(seconds=timeout))
    return Link(group, side, name, generation, run_id, timeout)


def _device(bind: str):
    if bind == "auto":
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1" if bind == "loopback" else bind)
