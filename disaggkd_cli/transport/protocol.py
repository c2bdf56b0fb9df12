"""The wire format: one fixed binary header, then a body whose exact size the header announced.

Every message starts with a header of `HEADER_BYTES` bytes; a small body stands behind it (`link.INLINE_BYTES`). Only
after the header has been validated is a larger body received, into a buffer of exactly the announced size (gloo aborts
the process when a message is longer than the posted buffer).
Bodies are int32 token data (request), hidden states in the wire dtype (ready), or bounded UTF-8 text (hello, welcome,
refusal, error). Nothing is pickled.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from disaggkd_cli.transport.authentication import NO_TAG, TAG_BYTES, Session
from disaggkd_cli.transport.errors import ProtocolError, Unproved

PROTOCOL_VERSION = 5
MAGIC = b"DKD1"
HEADER_BYTES = 128
MAX_TEXT_BYTES = 16 * 1024
PING_SECONDS = 5.0
"""A side that has nothing to say for this long (or a quarter of its timeout, if shorter) says PING."""
MAX_REQUEST_INTEGERS = 2**28
"""A request body is at most 1 GiB of int32; a header that announces more is refused before anything is allocated."""

_LAYOUT = struct.Struct("<4sHHQIHHQQIIQIIQIIIII")
_CHECKSUM = struct.Struct("<I")
_SIGNED_BYTES = _LAYOUT.size + TAG_BYTES
_PADDING = bytes(HEADER_BYTES - _SIGNED_BYTES - TAG_BYTES - _CHECKSUM.size)


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    REFUSAL = 3
    REQUEST = 4
    READY = 5
    ERROR = 6
    PING = 7
    STOP = 8


class StopReason(enum.IntEnum):
    """Why the sender hangs up; travels in `Header.flags` of a STOP."""

    LINK_CLOSED = 0
    FINISHED = 1
    STOPPED = 2
    QUARANTINED = 3
    TEACHER_LEAVING = 4


def stop_reason(header: Header) -> StopReason:
    """Return why the sender of a STOP hangs up.

    Raises:
        ProtocolError: an unknown reason.
    """
    try:
        return StopReason(header.flags)
    except ValueError as error:
        raise ProtocolError(f"unknown reason {header.flags} in STOP") from error


@dataclass(frozen=True)
class Header:
    """The fixed fields of every message; unused ones are zero.

    `run` is `run_number(run_id)`, `generation` the link's number, `ticket` one hand-out of a request (a request sent
    again gets a new ticket), `checksum` the crc32 of the body, `busy_ms` how long the teacher's current forward has
    been running, `queued` how many requests wait at the teacher, `inline` how many bytes of body stand behind the
    header in the same message: all of them, or none. `body_tag` stands for the checksum on links that have a session.
    """

    kind: Kind
    run: int = 0
    generation: int = 0
    dtype: int = 0
    flags: int = 0
    ticket: int = 0
    request_id: int = 0
    rows: int = 0
    width: int = 0
    token_hash: int = 0
    checksum: int = 0
    busy_ms: int = 0
    body_bytes: int = 0
    batch: int = 0
    sequence: int = 0
    documents: int = 0
    queued: int = 0
    inline: int = 0
    body_tag: bytes = NO_TAG

    def encode(self, session: Session | None = None) -> bytes:
        """Return the header as `HEADER_BYTES` bytes: fields, tag of the body, the session's tag of both (zeros without
        a session), crc32 of what stands before."""
        values = [int(getattr(self, field.name)) for field in fields(self) if field.name != "body_tag"]
        signed = _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, *values) + self.body_tag
        packed = signed + (session.tag_header(signed) if session else NO_TAG) + _PADDING
        return packed + _CHECKSUM.pack(zlib.crc32(packed))

    @staticmethod
    def decode(data: bytes, session: Session | None = None) -> Header:
        """Return the header that `data` holds.

        Raises:
            ProtocolError: wrong size, magic, version, checksum or kind; the message says which.
            Unproved: not the header that the other side of `session` sent next.
        """
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"a header has {HEADER_BYTES} bytes, this one has {len(data)}")
        magic, version, *values = _LAYOUT.unpack_from(data)
        if magic != MAGIC:
            raise ProtocolError(f"not a disaggkd header: it starts with {magic!r}, ours start with {MAGIC!r}")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}")
        if zlib.crc32(data[: -_CHECKSUM.size]) != _CHECKSUM.unpack_from(data, HEADER_BYTES - _CHECKSUM.size)[0]:
            raise ProtocolError("a header arrived damaged: its checksum is wrong")
        signed, tag = data[:_SIGNED_BYTES], data[_SIGNED_BYTES : _SIGNED_BYTES + TAG_BYTES]
        if session and not session.is_next_header(signed, tag):
            raise Unproved("a header is not signed with this run's secret, or is not the one that was to come")
        try:
            kind = Kind(values[0])
        except ValueError as error:
            raise ProtocolError(f"unknown message kind {values[0]}") from error
        return Header(kind, *values[1:], body_tag=signed[_LAYOUT.size :])


@dataclass(frozen=True)
class Request:
    """One ask of the student: hidden states of `rows` after a forward over `input_ids`.

    `input_ids` [B, S] int32; `document_lengths` [N] int32, flat, row by row, sums to B*S; `rows` [R] int32, flat
    indices into B*S.
    """

    request_id: int
    input_ids: Tensor
    document_lengths: Tensor
    rows: Tensor

    @property
    def num_rows(self) -> int:
        """How many rows are asked for, R."""
        return self.rows.numel()

    @property
    def num_tokens(self) -> int:
        """How many tokens the forward runs over, B*S."""
        return self.input_ids.numel()


def run_number(run_id: str) -> int:
    """Return 64 bits that stand for a run id in headers; 0 for the empty id."""
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=8).digest(), "little") if run_id else 0


def request_body(request: Request) -> Tensor:
    """Return ids, document lengths and rows as one [B*S + N + R] int32 tensor on the CPU.

    Raises:
        ValueError: a shape, an index out of range, or lengths that do not sum to B*S.
    """
    if request.input_ids.dim() != 2 or request.document_lengths.dim() != 1 or request.rows.dim() != 1:
        raise ValueError("a Request holds input_ids [B, S], document_lengths [N] and rows [R]")
    if int(request.document_lengths.sum()) != request.num_tokens:
        raise ValueError(f"document lengths sum to {int(request.document_lengths.sum())}, not {request.num_tokens}")
    if request.num_rows and not (0 <= int(request.rows.min()) and int(request.rows.max()) < request.num_tokens):
        raise ValueError(f"rows must be flat indices below {request.num_tokens}")
    parts = [request.input_ids.reshape(-1), request.document_lengths, request.rows]
    return torch.cat([part.to("cpu", torch.int32) for part in parts])


def hash_request_body(body: Tensor, batch: int, sequence: int, documents: int) -> int:
    """Return the token hash: 64 bits of BLAKE2b over the shape and the int32 body, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<III", batch, sequence, documents), digest_size=8)
    digest.update(memoryview(body.numpy()))
    return int.from_bytes(digest.digest(), "little")


def request_header(request: Request, body: Tensor, ticket: int) -> Header:
    """Return the header that announces `body`, except for the link's own fields."""
    batch, sequence = request.input_ids.shape
    documents = request.document_lengths.numel()
    return Header(
        Kind.REQUEST,
        ticket=ticket,
        request_id=request.request_id,
        rows=request.num_rows,
        token_hash=hash_request_body(body, batch, sequence, documents),
        body_bytes=body.numel() * 4,
        batch=batch,
        sequence=sequence,
        documents=documents,
    )


def request_integers(header: Header) -> int:
    """Return how many int32 the body of a REQUEST has, after checking that the header agrees with itself."""
    count = header.batch * header.sequence + header.documents + header.rows
    if header.body_bytes != 4 * count or count > MAX_REQUEST_INTEGERS:
        raise ProtocolError(f"request {header.request_id} announces {header.body_bytes} bytes for {count} integers")
    return count


def decode_request(header: Header, body: Tensor) -> Request:
    """Return the request that `body` [B*S + N + R] int32 holds, its token hash and indices verified.

    Raises:
        ProtocolError: when hash, lengths or rows do not agree.
    """
    tokens = header.batch * header.sequence
    if hash_request_body(body, header.batch, header.sequence, header.documents) != header.token_hash:
        raise ProtocolError(f"request {header.request_id} arrived damaged: its token hash is wrong")
    input_ids, lengths, rows = body.split([tokens, header.documents, header.rows])
    request = Request(header.request_id, input_ids.view(header.batch, header.sequence), lengths, rows)
    if int(lengths.sum()) != tokens or (header.rows and (int(rows.min()) < 0 or int(rows.max()) >= tokens)):
        raise ProtocolError(f"request {header.request_id} has lengths or rows outside of its {tokens} tokens")
    return request
