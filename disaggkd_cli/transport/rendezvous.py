"""Who is there: the TCPStore where teachers announce themselves and student ranks invite them to form links.

Keys (all under `disaggkd/`):
  `teachers`                    how many teacher ranks ever announced themselves; the next one's number
  `changes`                     a counter that a teacher advances when it has announced itself or withdrawn
  `teacher/N/identity`          JSON of its Identity
  `teacher/N/alive`             heartbeats: a counter that the teacher advances every `HEARTBEAT_SECONDS`
  `teacher/N/invitations`       how many links it was ever invited to
  `teacher/N/invitation/M`      JSON of the student's Identity; the link is `teacher/N/link/M`, its generation M
  `teacher/N/accepted/M`        set by the teacher, which then forms the link
  `student/ended`               set when the student is done for good, with the reason

Identities are sealed with the run's secret, where it has one; each key is then below `Secret.rooted`.
A teacher that restarts is a new number; nothing is ever reused, so nobody can meet the leftovers of a dead peer.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from disaggkd_cli.addresses import listen, split_endpoint
from disaggkd_cli.errors import RunError
from disaggkd_cli.transport.authentication import NO_SECRET, Secret
from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.identity import Identity

HEARTBEAT_SECONDS = 1.0
MOST_TEACHERS = 20_000
"""Numbers of teachers, with those that came again, that a rank looks at; a counter beyond that is not believed."""
_POLL_SECONDS = 0.05
_ROOT = "disaggkd/"


def open_store(
    endpoint: str,
    *,
    host_it: bool,
    listen_fd: int | None = None,
    listen_on: str | None = None,
    timeout: float = 60.0,
) -> dist.TCPStore:
    """Return a connection to the rendezvous store at `endpoint` (`host:port`).

    With `host_it` this process serves the store, on exactly the host's address (so `127.0.0.1:...` is loopback only),
    on the address `listen_on`, or on the already listening socket `listen_fd`. `store.port` tells the port.

    Raises:
        UserError: a malformed endpoint or a busy port.
        RunError: nobody serves the store there within `timeout` seconds.
    """
    host, port = split_endpoint(endpoint)
    wait = timedelta(seconds=timeout)
    if host_it:
        # The C++ store closes this descriptor when it goes, so it gets one of its own.
        file_descriptor = os.dup(listen_fd) if listen_fd is not None else listen(listen_on or host, port).detach()
        bound = socket.socket(fileno=os.dup(file_descriptor))
        with bound:
            port = bound.getsockname()[1]
        return dist.TCPStore(host, port, None, True, wait, False, master_listen_fd=file_descriptor)
    deadline = time.monotonic() + timeout
    while not _answers(host, port):
        if time.monotonic() >= deadline:
            raise RunError(
                f"nobody serves the rendezvous at {host}:{port} after {timeout:g} s; start the student there, or "
                "correct launch.rendezvous"
            )
        time.sleep(4 * _POLL_SECONDS)
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=max(1.0, deadline - time.monotonic())), False)
    except RuntimeError as error:
        raise RunError(f"something at {host}:{port} answers, but it is no rendezvous store: {error}") from error


def _answers(host: str, port: int) -> bool:
    # A plain connection first: TCPStore's own retries fill the log with warnings.
    try:
        socket.create_connection((host, port), timeout=2.0).close()
        return True
    except OSError:
        return False


def store_endpoint(store: dist.Store) -> str:
    """Return `host:port` of a TCPStore, also when prefixes are wrapped around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}"


def announce_teacher(store: dist.Store, identity: Identity, secret: Secret = NO_SECRET) -> int:
    """Announce a teacher rank and return its number.

    Raises:
        RunError: somebody counted up what counts teachers; a student rank puts that right, so try again.
    """
    number = store.add(_ROOT + "teachers", 1) - 1
    if not 0 <= number < MOST_TEACHERS:
        raise RunError(f"the rendezvous gives number {number} to a teacher, {MOST_TEACHERS} at most are looked at")
    key = teacher_key(number, "identity")
    store.set(key, secret.seal(key, identity.encode()))
    record_heartbeat(store, number)
    store.add(_ROOT + "changes", 1)
    return number


def record_heartbeat(store: dist.Store, number: int) -> None:
    """Advance the teacher's counter of heartbeats."""
    store.add(f"{_ROOT}teacher/{number}/alive", 1)


def withdraw_teacher(store: dist.Store, number: int) -> None:
    """Tell students not to invite this teacher any more."""
    store.set(f"{_ROOT}teacher/{number}/withdrawn", b"1")
    store.add(_ROOT + "changes", 1)


def roster_version(store: dist.Store) -> int:
    """Return a number that is another one whenever a teacher came or withdrew."""
    return store.add(_ROOT + "changes", 0)


def heartbeat_count(store: dist.Store, number: int) -> int:
    """Return a teacher's counter of heartbeats."""
    return store.add(f"{_ROOT}teacher/{number}/alive", 0)


def teachers_key() -> str:
    """Return the key that counts the announced teachers."""
    return _ROOT + "teachers"


def changes_key() -> str:
    """Return the key that counts changes of the roster."""
    return _ROOT + "changes"


def teacher_key(number: int, what: str) -> str:
    """Return the key of what a teacher says: `identity`, `withdrawn`."""
    return f"{_ROOT}teacher/{number}/{what}"


def invitation_keys(number: int, generation: int) -> tuple[str, str]:
    """Return the keys of a teacher's count of invitations, and of one of them."""
    return f"{_ROOT}teacher/{number}/invitations", f"{_ROOT}teacher/{number}/invitation/{generation}"


def invite_teacher(store: dist.Store, number: int, student: Identity, secret: Secret = NO_SECRET) -> int:
    """Invite a teacher to a new link and return the link's generation."""
    generation = store.add(f"{_ROOT}teacher/{number}/invitations", 1)
    _, key = invitation_keys(number, generation)
    store.set(key, secret.seal(key, student.encode()))
    return generation


def await_acceptance(store: dist.Store, number: int, generation: int, timeout: float) -> None:
    """Wait until the teacher has accepted.

    Raises:
        LinkLost: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not store.check([f"{_ROOT}teacher/{number}/accepted/{generation}"]):
        if time.monotonic() >= deadline:
            raise LinkLost(f"teacher number {number} did not answer invitation {generation} within {timeout:g} s")
        time.sleep(_POLL_SECONDS)


def accept_invitation(store: dist.Store, number: int, generation: int) -> None:
    """Tell the student that this teacher now forms the link."""
    store.set(f"{_ROOT}teacher/{number}/accepted/{generation}", b"1")


def link_key(number: int, generation: int) -> str:
    """Return the store prefix under which the two sides of a link find each other."""
    return f"{_ROOT}teacher/{number}/link/{generation}"


def end_student(store: dist.Store, reason: str) -> None:
    """Record that the student is done for good (`finished` or `stopped`); teachers then end too."""
    store.set(_ROOT + "student/ended", reason.encode())


def student_end(store: dist.Store) -> str:
    """Return why the student ended, or an empty text while it has not."""
    key = _ROOT + "student/ended"
    reason = store.get(key).decode(errors="replace") if store.check([key]) else ""
    return reason if reason in ("finished", "stopped") else ""


def begin_student(store: dist.Store) -> None:
    """Clear the end that an earlier attempt of the student left in a store that outlived it."""
    store.delete_key(_ROOT + "student/ended")
