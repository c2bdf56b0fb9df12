"""A gloo pair's listening socket, closed to newcomers once the two have met.

gloo keeps listening for as long as a pair lives and holds on to whoever connects, also after he has hung up, so anybody
who finds the port could use up this process's descriptors. Its socket cannot be closed under it; the kernel can be told
to drop what arrives there. Connections that stand already are others to the kernel and go on.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of Linux, which Python's socket module does not name (man 7 socket)."""
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""One instruction of the classic packet filter, `return 0`: keep no byte, that is, drop (linux/filter.h)."""
_opening = threading.Lock()
Opened = TypeVar("Opened")


def opening(open_it: Callable[[], Opened]) -> tuple[Opened, list[int]]:
    """Return what `open_it` returns, and the descriptors of the TCP sockets that listen since then.

    One at a time in this process, so that they are those of `open_it`. None are found where /proc is not.
    """
    with _opening:
        before = _listening()
        opened = open_it()
        return opened, sorted(_listening() - before)


def deafen(descriptors: list[int]) -> None:
    """Let nobody else connect to these listening sockets; does nothing where the system cannot."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    filters = struct.pack("HL", 1, ctypes.addressof(program))
    for descriptor in descriptors:
        listener = socket.socket(fileno=descriptor)
        try:
            listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filters)
        except OSError:
            pass  # it keeps listening, as before
        finally:
            listener.detach()


def deafen_all_but(port: int) -> None:
    """Let nobody else connect to whatever listens in this process now, but for the rendezvous at `port`.

    For groups of ranks that have just formed; no link may be forming meanwhile.
    """
    with _opening:
        deafen([descriptor for descriptor in _listening() if _port_of(descriptor) != port])


def _port_of(descriptor: int) -> int:
    listener = socket.socket(fileno=descriptor)
    try:
        return listener.getsockname()[1]
    finally:
        listener.detach()


def _listening() -> set[int]:
    if not sys.platform.startswith("linux"):
        return set()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _listens(int(name)):
                found.add(int(name))
        except OSError:
            continue  # closed meanwhile
    return found


def _listens(descriptor: int) -> bool:
    sock = socket.socket(fileno=descriptor)
    try:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and bool(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    finally:
        sock.detach()
