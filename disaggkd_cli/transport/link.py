"""A link between one student rank and one teacher replica: headers, request bodies and texts; its payloads beside them.

A link is disposable. Any error closes it; the two sides then form another under a new generation. Each direction is
used by one thread at a time: one sends, one receives.

A small body travels behind its header, in the same message. For larger payloads the receive of the next header is
posted before the payload of this one, and payloads have a pair of their own, so a READY is read, and the receive of its
payload started, while the payload before it still travels. A payload's own receive is started only after its READY has
been validated.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.authentication import NO_SECRET, NO_TAG, Secret, Session, open_session
from disaggkd_cli.transport.checksum import body_checks, body_problem
from disaggkd_cli.transport.errors import ProtocolError
from disaggkd_cli.transport.pair import STUDENT, TEACHER, GlooPair, GlooTransfer, Tag, Transfer, form_pair
from disaggkd_cli.transport.payloads import HostPayloads, PayloadChannel
from disaggkd_cli.transport.protocol import HEADER_BYTES, MAX_TEXT_BYTES, Header, Kind, run_number

INLINE_BYTES = 256 * 1024
"""Bodies up to this size travel behind their header. Larger ones are worth a message of their own: no copy."""
_TRAILER_BYTES = 4
"""Behind such a body the header's checksum stands once more: so it is seen to have come whole."""

__all__ = ["INLINE_BYTES", "STUDENT", "TEACHER", "Link", "form_link"]


class Link:
    """One side of a link.

    Args:
        pair: carries everything but payloads, which have a channel of their own as soon as the handshake is done.
        generation: the number both sides agreed on; a header of another one is refused.
        run_id: headers of another run are refused.
        key: where the two sides of this link, and nobody else, look for each other at the rendezvous.
        session: signs what this side sends and verifies what comes; None where the run has no secret.

    Attributes:
        payloads: how hidden states travel; a READY header goes before each. Host memory until set otherwise.
        pair: from outside only to form other payloads over it, and to measure gloo itself.
    """

    def __init__(self, pair: GlooPair, generation: int, run_id: str, key: str = "", session: Session | None = None):
        self.pair = pair
        self.key = key
        self.session = session
        self.payloads: PayloadChannel = HostPayloads(pair)
        self.name = pair.name
        self.timeout = pair.timeout
        self.generation = generation
        self._run = run_number(run_id)
        # Two, since the next message is received while the body of this one is read.
        self._messages_in = [torch.zeros(HEADER_BYTES + INLINE_BYTES + _TRAILER_BYTES, dtype=torch.uint8) for _ in "ab"]
        self._inline_in: Tensor | None = None
        self._next_header: GlooTransfer | None = None

    def start_header(self, header: Header) -> Transfer:
        """Start to send one header, stamped with this link's run and generation; its body follows by itself."""
        stamped = replace(header, run=self._run, generation=self.generation)
        message = torch.frombuffer(bytearray(stamped.encode(self.session)), dtype=torch.uint8)
        return self.pair.start_send(message, Tag.HEADER, f"a {header.kind.name} header")

    def start_message(self, header: Header, body: Tensor) -> Transfer:
        """Start to send a header with `body` (uint8 in host memory, at most `INLINE_BYTES`, copied here) behind it."""
        size = body.numel()
        stamped = replace(header, run=self._run, generation=self.generation, body_bytes=size, inline=size)
        message = torch.empty(HEADER_BYTES + size + _TRAILER_BYTES, dtype=torch.uint8)
        message[:HEADER_BYTES] = torch.frombuffer(bytearray(stamped.encode(self.session)), dtype=torch.uint8)
        message[HEADER_BYTES : HEADER_BYTES + size] = body
        message[HEADER_BYTES + size :] = message[HEADER_BYTES - _TRAILER_BYTES : HEADER_BYTES]
        return self.pair.start_send(message, Tag.HEADER, f"a {header.kind.name} message")

    def carries(self, payload_bytes: int) -> bool:
        """Return whether a payload of this size travels behind its READY: it is small and lies in host memory."""
        return payload_bytes <= INLINE_BYTES and self.payloads.checksums

    def send_header(self, header: Header) -> None:
        """Send one header and wait until it is on its way."""
        self.start_header(header).wait()

    def receive_header(self) -> Header:
        """Receive and validate one header.

        Raises:
            LinkLost: nothing came within the timeout, or the peer is gone.
            ProtocolError: what came is not a header of this run and link, or its body is not behind it.
            Unproved: the peer did not sign it.
        """
        arriving = self._next_header or self._post_header()
        self._next_header = None
        arriving.wait()
        message = self._messages_in[0]
        self._messages_in.reverse()
        self._next_header = self._post_header()  # at once: the peer's next message waits for it
        header = Header.decode(message[:HEADER_BYTES].numpy().tobytes(), self.session)
        if header.run != self._run:
            raise ProtocolError(f"{self.name}: a header of another run (number {header.run:x}, ours is {self._run:x})")
        if header.generation != self.generation:
            raise ProtocolError(f"{self.name}: a header of generation {header.generation}, not {self.generation}")
        self._inline_in = self._body_of(message, header)
        return header

    def inline_body(self) -> Tensor | None:
        """Return the body that stood behind the last header, uint8, until the next one is received; None without."""
        return self._inline_in

    def _body_of(self, message: Tensor, header: Header) -> Tensor | None:
        size = header.inline
        if not size:
            return None
        if size != header.body_bytes or size > INLINE_BYTES:
            raise ProtocolError(f"{self.name}: a body of {header.body_bytes} bytes, {size} of them behind its header")
        end = HEADER_BYTES + size
        # A message may be shorter than the receive that is posted for it, which gloo does not tell.
        if not torch.equal(message[end : end + _TRAILER_BYTES], message[HEADER_BYTES - _TRAILER_BYTES : HEADER_BYTES]):
            raise ProtocolError(f"{self.name}: a message ended before the {size} bytes of body that it announced")
        return message[HEADER_BYTES:end]

    def send_text(self, kind: Kind, text: bytes, **header_fields: int) -> None:
        """Send a header of `kind` and `text` as its body (cut at `MAX_TEXT_BYTES`)."""
        body = torch.frombuffer(bytearray(text[:MAX_TEXT_BYTES] or b" "), dtype=torch.uint8)
        self.start_message(Header(kind, **body_checks(body, self.session), **header_fields), body).wait()

    def receive_text(self, header: Header) -> bytes:
        """Return the text that came with `header`, the last one received."""
        if not 0 < header.body_bytes <= MAX_TEXT_BYTES:
            raise ProtocolError(f"{self.name}: a text of {header.body_bytes} bytes announced, {MAX_TEXT_BYTES} allowed")
        body = self._inline_in
        if body is None:
            raise ProtocolError(f"{self.name}: {header.kind.name} without its text")
        if self.session and header.body_tag == NO_TAG:
            raise ProtocolError(f"{self.name}: a text that nobody signed")
        if problem := body_problem(body, header.checksum, header.body_tag, self.session):
            raise ProtocolError(f"{self.name}: a text arrived damaged: {problem}")
        return body.numpy().tobytes()

    def send_request(self, header: Header, body: Tensor) -> None:
        """Send a header and its int32 body: together where the body is small."""
        if 4 * body.numel() <= INLINE_BYTES:
            self.start_message(header, body.view(torch.uint8)).wait()
        else:
            self.send_header(header)
            self.send_request_body(body)

    def send_request_body(self, body: Tensor) -> None:
        """Send the int32 body of a request whose header has gone before."""
        self.pair.start_send(body.view(torch.uint8), Tag.BODY, "a request").wait()

    def receive_request_body(self, integers: int) -> Tensor:
        """Return the `integers` int32 that the last header, a REQUEST, announced."""
        if self._inline_in is not None:
            return self._inline_in.view(torch.int32).clone()
        body = torch.empty(integers, dtype=torch.int32)
        self.pair.start_receive(body.view(torch.uint8), Tag.BODY, "a request").wait()
        return body

    def close(self) -> None:
        """Hang up, from any thread."""
        self._next_header = None
        self.payloads.close()
        self.pair.close()

    def _post_header(self) -> GlooTransfer:
        return self.pair.start_receive(self._messages_in[0], Tag.HEADER, "a header")


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
    secret: Secret = NO_SECRET,
) -> Link:
    """Form the link `key` with the peer, which calls this with the other `side`.

    Args:
        store: a connection of the calling thread's own (a store serves one blocking call at a time).
        side: `STUDENT` or `TEACHER`.
        forming_timeout: seconds to wait for the peer to come; default `timeout`.
        bind: `loopback`, an address or host name of this machine to listen on, or `auto` (gloo chooses, and honours
            `GLOO_SOCKET_IFNAME`).
        secret: of the run; the first message then proves that the peer knows it. Default: none.

    Raises:
        LinkLost: the peer did not come in time.
    """
    wait = forming_timeout or timeout
    store.set_timeout(timedelta(seconds=wait))
    session = open_session(store, key, side, secret, name)
    where = f"{key}/{session.name}" if session else key
    pair = form_pair(store, where, side, name=name, timeout=timeout, forming_timeout=wait, bind=bind)
    return Link(pair, generation, run_id, where, session)
