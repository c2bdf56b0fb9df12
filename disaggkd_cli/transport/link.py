"""A link between one student rank and one teacher replica: headers, request bodies and texts; its payloads beside them.

A link is disposable. Any error closes it; the two sides then form another under a new generation. Each direction is
used by one thread at a time: one sends, one receives.

The receive of the next header is posted before the payload of this one, and payloads have a pair of their own, so a
READY is read, and the receive of its payload started, while the payload before it still travels. A payload's own
receive is started only after its READY has been validated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.checksum import payload_checksum
from disaggkd_cli.transport.errors import ProtocolError
from disaggkd_cli.transport.pair import STUDENT, TEACHER, GlooPair, GlooTransfer, Tag, Transfer, form_pair
from disaggkd_cli.transport.payloads import HostPayloads, PayloadChannel
from disaggkd_cli.transport.protocol import HEADER_BYTES, MAX_TEXT_BYTES, Header, Kind, run_number

__all__ = ["STUDENT", "TEACHER", "Link", "form_link"]


class Link:
    """One side of a link.

    Args:
        pair: carries everything but payloads, which have a channel of their own as soon as the handshake is done.
        generation: the number both sides agreed on; a header of another one is refused.
        run_id: headers of another run are refused.

    Attributes:
        payloads: how hidden states travel; a READY header goes before each. Host memory until set otherwise.
        pair: from outside only to form other payloads over it, and to measure gloo itself.
    """

    def __init__(self, pair: GlooPair, generation: int, run_id: str):
        self.pair = pair
        self.payloads: PayloadChannel = HostPayloads(pair)
        self.name = pair.name
        self.timeout = pair.timeout
        self.generation = generation
        self._run = run_number(run_id)
        self._header_in = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._next_header: GlooTransfer | None = None

    def start_header(self, header: Header) -> Transfer:
        """Start to send one header, stamped with this link's run and generation."""
        stamped = replace(header, run=self._run, generation=self.generation)
        message = torch.frombuffer(bytearray(stamped.encode()), dtype=torch.uint8)
        return self.pair.start_send(message, Tag.HEADER, f"a {header.kind.name} header")

    def send_header(self, header: Header) -> None:
        """Send one header and wait until it is on its way."""
        self.start_header(header).wait()

    def receive_header(self) -> Header:
        """Receive and validate one header.

        Raises:
            LinkLost: nothing came within the timeout, or the peer is gone.
            ProtocolError: what came is not a header of this run and link.
        """
        arriving = self._next_header or self._post_header()
        self._next_header = None
        arriving.wait()
        header = Header.decode(self._header_in.numpy().tobytes())
        if header.run != self._run:
            raise ProtocolError(f"{self.name}: a header of another run (number {header.run:x}, ours is {self._run:x})")
        if header.generation != self.generation:
            raise ProtocolError(f"{self.name}: a header of generation {header.generation}, not {self.generation}")
        self._next_header = self._post_header()
        return header

    def send_text(self, kind: Kind, text: bytes, **header_fields: int) -> None:
        """Send a header of `kind` and `text` as its body (cut at `MAX_TEXT_BYTES`)."""
        body = torch.frombuffer(bytearray(text[:MAX_TEXT_BYTES] or b" "), dtype=torch.uint8)
        fields = {"body_bytes": body.numel(), "checksum": payload_checksum(body), **header_fields}
        self.send_header(Header(kind, **fields))
        self.pair.start_send(body, Tag.BODY, "a text").wait()

    def receive_text(self, header: Header) -> bytes:
        """Receive the text that `header` announced."""
        if not 0 < header.body_bytes <= MAX_TEXT_BYTES:
            raise ProtocolError(f"{self.name}: a text of {header.body_bytes} bytes announced, {MAX_TEXT_BYTES} allowed")
        body = torch.empty(header.body_bytes, dtype=torch.uint8)
        self.pair.start_receive(body, Tag.BODY, "a text").wait()
        if payload_checksum(body) != header.checksum:
            raise ProtocolError(f"{self.name}: a text arrived damaged")
        return body.numpy().tobytes()

    def send_request_body(self, body: Tensor) -> None:
        """Send the int32 body of a request whose header has gone before."""
        self.pair.start_send(body.view(torch.uint8), Tag.BODY, "a request").wait()

    def receive_request_body(self, integers: int) -> Tensor:
        """Receive the `integers` int32 that a REQUEST header announced."""
        body = torch.empty(integers, dtype=torch.int32)
        self.pair.start_receive(body.view(torch.uint8), Tag.BODY, "a request").wait()
        return body

    def close(self) -> None:
        """Hang up, from any thread."""
        self._next_header = None
        self.payloads.close()
        self.pair.close()

    def _post_header(self) -> GlooTransfer:
        return self.pair.start_receive(self._header_in, Tag.HEADER, "a header")


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
    """Form the link `key` with the peer, which calls this with the other `side`.

    Args:
        store: a connection of the calling thread's own (a store serves one blocking call at a time).
        side: `STUDENT` or `TEACHER`.
        forming_timeout: seconds to wait for the peer to come; default `timeout`.
        bind: `loopback`, an address or host name of this machine to listen on, or `auto` (gloo chooses, and honours
            `GLOO_SOCKET_IFNAME`).

    Raises:
        LinkLost: the peer did not come in time.
    """
    wait = forming_timeout or timeout
    pair = form_pair(store, key, side, name=name, timeout=timeout, forming_timeout=wait, bind=bind)
    return Link(pair, generation, run_id)
