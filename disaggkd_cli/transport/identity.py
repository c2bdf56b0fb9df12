"""Who a peer is, and whether the two belong together: compared before the first request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from disaggkd_cli.transport.errors import IncompatiblePeer, ProtocolError
from disaggkd_cli.transport.protocol import PROTOCOL_VERSION

_MENDS = {
    "protocol_version": "install the same disaggkd version on both sides",
    "teacher_fingerprint": "give both sides the same teacher.model (same weights and config)",
    "tokenizer_fingerprint": "give both sides the same teacher tokenizer files",
    "vocabulary_size": "give both sides the same teacher.model",
    "hidden_size": "give both sides the same teacher.model",
    "wire_dtype": "give both sides the same transport.dtype",
    "run_id": "point the teacher at this student's launch.rendezvous",
}


MAX_BYTES = 16 * 1024
MAX_FIELD = 1024
"""Bytes of an identity, and characters of a field of one, that are believed of a peer."""


@dataclass(frozen=True)
class Identity:
    """What each side says about itself in the handshake.

    An empty text or a zero means "does not say" and is not compared (a teacher started on its own need not know the
    student's `run_id`). `role` is for messages only, such as `teacher 1` or `student 0`. `device` and `backend` say
    how payloads may travel (`backends.describe_device`). `probe` tells which bits a teacher computes (`probe`), and
    `numerics`, for messages, what decides them.
    """

    role: str
    teacher_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    vocabulary_size: int = 0
    hidden_size: int = 0
    wire_dtype: str = "bfloat16"
    run_id: str = ""
    protocol_version: int = PROTOCOL_VERSION
    device: str = ""
    backend: str = ""
    probe: str = ""
    numerics: str = ""

    def encode(self) -> bytes:
        """Return the identity as UTF-8 JSON of flat texts and numbers."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def decode(data: bytes) -> Identity:
        """Return the identity in `data`.

        Raises:
            ProtocolError: when it is not the flat record that `encode` writes.
        """
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"{len(data)} bytes, at most {MAX_BYTES} are read")
            record = json.loads(data)
            version = record.get("protocol_version") if isinstance(record, dict) else None
            if version != PROTOCOL_VERSION and isinstance(version, int):
                raise ValueError(f"it speaks protocol version {version}, this side {PROTOCOL_VERSION}")
            expected = {field.name: int if field.type == "int" else str for field in fields(Identity)}
            if set(record) != set(expected) or any(type(record[name]) is not kind for name, kind in expected.items()):
                raise ValueError("unexpected fields")
            if any(
                len(value) > MAX_FIELD or not value.isprintable() for value in record.values() if type(value) is str
            ):
                raise ValueError(f"a text of more than {MAX_FIELD} characters, or with some that do not print")
            return Identity(**record)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"the peer's introduction is not readable: {error}") from error


def compare_identities(ours: Identity, theirs: Identity) -> None:
    """Return quietly when the two sides belong together.

    Raises:
        IncompatiblePeer: lists every field that differs with both sides' values and the mend.
    """
    problems = []
    for name, mend in _MENDS.items():
        here, there = getattr(ours, name), getattr(theirs, name)
        if here and there and here != there:
            label = name.replace("_", " ")
            problems.append(f"{label}: {ours.role} has {here}, {theirs.role} has {there}; {mend}")
    if problems:
        raise IncompatiblePeer(f"{ours.role} and {theirs.role} do not belong together. " + " | ".join(problems))
