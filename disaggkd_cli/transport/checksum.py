"""What says that bodies and payloads came as they were sent: a checksum, or on a link with a session a tag."""

from __future__ import annotations

import zlib

from torch import Tensor

from disaggkd_cli.transport.authentication import NO_TAG, Session


def payload_checksum(payload: Tensor) -> int:
    """Return the crc32 of a CPU uint8 tensor. zlib releases the interpreter lock for it."""
    return zlib.crc32(memoryview(payload.numpy()))


def body_checks(body: Tensor, session: Session | None) -> dict[str, int | bytes]:
    """Return the fields of the header that goes before `body` (uint8, in host memory)."""
    if session:
        return {"body_tag": session.tag_body(memoryview(body.numpy()))}
    return {"checksum": payload_checksum(body)}


def body_problem(body: Tensor, checksum: int, body_tag: bytes, session: Session | None) -> str:
    """Return what is wrong with a body whose header brought these two, or an empty text; neither means unchecked."""
    if session and body_tag != NO_TAG and body_tag != session.tag_body(memoryview(body.numpy())):
        return "its tag is wrong: it was not sent so by who knows the secret"
    if checksum and payload_checksum(body) != checksum:
        return "its checksum is wrong"
    return ""
