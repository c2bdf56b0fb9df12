"""Proof that what was read at the rendezvous, or came over a link, was written by somebody who knows the run's secret.

A `Secret` seals entries of the rendezvous. Each link has a `Session` of its own, keyed by the secret and by a fresh
number of either side: its tags say which side wrote a header, as which one of this link, so nothing of another link,
of another run or from before can be passed off as new. All tags are HMAC-SHA256 (RFC 2104), cut to 128 bits in headers.
Nothing is encrypted. Without a secret, entries and headers are as they come.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from pathlib import Path

import torch.distributed as dist

from disaggkd_cli.transport.errors import LinkLost, ProtocolError

TAG_BYTES = 16
NO_TAG = bytes(TAG_BYTES)
_SEAL_BYTES = 32
_NONCE_BYTES = 16
_HINT = "disaggkd/secret/"
_MOST_PATH_BYTES = 4096


def _tag(key: bytes, *parts: bytes | memoryview) -> bytes:
    # Not hmac.digest: this one lets other threads run while it reads a payload.
    digest = hmac.new(key, digestmod="sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()


class Secret:
    """The secret of a run.

    Args:
        key: its bytes; empty means that there is none, and nothing is proved.

    Attributes:
        name: tells secrets from each other and nothing about them; `none` without one.
    """

    def __init__(self, key: bytes = b""):
        self._key = key
        self.name = _tag(key, b"name").hex()[:8] if key else "none"

    def __bool__(self) -> bool:
        return bool(self._key)

    def rooted(self, store: dist.Store) -> dist.Store:
        """Return the part of a store where those with this secret meet, so that others' entries are not even read."""
        return dist.PrefixStore(f"secret/{_tag(self._key, b'root').hex()[:32]}", store) if self else store

    def seal(self, place: str, data: bytes) -> bytes:
        """Return `data` as it is written at `place` of the rendezvous."""
        return self._seal(place, data) + data if self else data

    def open(self, place: str, sealed: bytes) -> bytes:
        """Return what was sealed for `place`.

        Raises:
            ProtocolError: this secret did not seal it there.
        """
        if not self:
            return sealed
        seal, data = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(place, data)):
            raise ProtocolError("it is not signed with this run's secret")
        return data

    def _seal(self, place: str, data: bytes) -> bytes:
        return _tag(self._key, b"seal", struct.pack("<I", len(place)), place.encode(), data)

    def session(self, link: str, side: int, nonces: tuple[bytes, bytes]) -> Session:
        """Return one side's session of a link.

        Args:
            link: the link's key at the rendezvous.
            nonces: fresh numbers of side 0 and of side 1.
        """
        return Session(_tag(self._key, b"session", *nonces, link.encode()), side)


NO_SECRET = Secret()


class Session:
    """Tags of one side of one link. Headers are tagged by one thread at a time, and verified by one.

    Attributes:
        name: where only these two sides look for each other at the rendezvous.
    """

    def __init__(self, key: bytes, side: int):
        self._key = key
        self._ours, self._theirs = side, 1 - side
        self._sent = self._received = 0
        self.name = _tag(key, b"name").hex()[:32]

    def tag_header(self, header: bytes) -> bytes:
        """Return the tag of the next header that this side sends."""
        self._sent += 1
        return self._header_tag(self._ours, self._sent, header)

    def is_next_header(self, header: bytes, tag: bytes) -> bool:
        """Return whether `tag` is that of the next header that the other side sent."""
        self._received += 1
        return hmac.compare_digest(tag, self._header_tag(self._theirs, self._received, header))

    def tag_body(self, body: memoryview) -> bytes:
        """Return the tag of a body or a payload; it stands in a header, whose own tag says which."""
        return _tag(self._key, b"body", body)[:TAG_BYTES]

    def _header_tag(self, side: int, number: int, header: bytes) -> bytes:
        return _tag(self._key, struct.pack("<4sBQ", b"head", side, number), header)[:TAG_BYTES]


def open_session(store: dist.Store, key: str, side: int, secret: Secret, name: str) -> Session | None:
    """Return this side's session of link `key`, once the other side has brought its number too; None without a secret.

    Args:
        store: a connection of the calling thread's own; its timeout bounds the wait.
        name: of the link, for messages.

    Raises:
        LinkLost: the other side did not come in time.
    """
    if not secret:
        return None
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        store.set(f"{key}/nonce/{side}", ours)
        theirs = bytes(store.get(f"{key}/nonce/{1 - side}"))
    except RuntimeError as error:
        raise LinkLost(f"{name}: the peer did not come to form the link: {str(error).splitlines()[0]}") from error
    return secret.session(key, side, (ours, theirs) if side == 0 else (theirs, ours))


def tell_secret(store: dist.Store, role: str, secret: Secret) -> None:
    """Write at the rendezvous, for messages only, which secret `role` (`student`, `teacher`) has."""
    store.set(_HINT + role, secret.name)


def other_secret(store: dist.Store, role: str, secret: Secret) -> str:
    """Return what to say where `role` last said that it has another secret than this one; else an empty text.

    Anybody may have written that, so it decides nothing.
    """
    if not store.check([_HINT + role]):
        return ""
    theirs = store.get(_HINT + role).decode(errors="replace")[:8]
    if theirs == secret.name:
        return ""
    return (
        f"the {role} at this rendezvous has secret {theirs!r}, this side {secret.name!r}: give both sides the same "
        "launch.secret_file, or none"
    )


def tell_secret_file(store: dist.Store, path: Path) -> None:
    """Say at the rendezvous where the file with the secret is, for those who can read it there."""
    store.set(_HINT + "file", str(path).encode())


def told_secret_file(store: dist.Store, name: str) -> Path | None:
    """Return where the student says that the secret is, if it says so and the file is called `name`.

    Anybody may have written that. A file that is another one costs the meeting, as any wrong secret does, and no more.
    """
    if not store.check([_HINT + "file"]):
        return None
    path = Path(os.fsdecode(bytes(store.get(_HINT + "file"))[:_MOST_PATH_BYTES]))
    return path if path.name == name and path.is_absolute() else None
