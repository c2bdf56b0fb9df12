"""Which address to listen on: loopback unless told otherwise."""

from __future__ import annotations

import ipaddress
import os
import socket
from functools import cache

import psutil

from disaggkd_cli.errors import UserError


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        UserError: when it is not of that form.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"launch.rendezvous={endpoint!r} is not host:port, such as 127.0.0.1:29500")
    return host.strip("[]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address and no other. Port 0 takes a free one.

    Raises:
        UserError: the port is taken or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(
            f"launch.rendezvous: cannot listen on {host}:{port} ({error.strerror or error}); "
            "choose a free port and an address of this machine"
        ) from error
    return listener


@cache
def loopback_address() -> str:
    """Return this machine's own loopback address: 127.0.0.1, or ::1 where it has IPv6 only."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
                return address
        except OSError:
            continue
    return "127.0.0.1"  # whoever listens there says what is wrong


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_address(name: str) -> str | None:
    """Return the first IPv4 (else IPv6) address of the network interface `name`, or None where there is none."""
    known = psutil.net_if_addrs().get(name, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known:
            if entry.family == family:
                return entry.address.partition("%")[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface that has `address` (an IP address or a host name)."""
    try:
        numeric = {info[4][0] for info in socket.getaddrinfo(address, None)}
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] in numeric for entry in entries):
            return name
    return None


def resolve_bind(bind: str, endpoint: str) -> str:
    """Return the address that links listen on, for `form_link`, from `launch.bind` and the rendezvous endpoint.

    `loopback` is for one machine. `all` and `auto` take the address of the interface that leads to the rendezvous (or
    leave the choice to gloo when `GLOO_SOCKET_IFNAME` names an interface): a link listens on one address only, the
    one it tells its peer. Anything else is the name of an interface of this machine, such as `ib0`, or an address.

    Raises:
        UserError: `loopback` with a rendezvous on another address, or a host that cannot be resolved.
    """
    host, port = split_endpoint(endpoint)
    if bind == "loopback":
        if not is_loopback(host):
            raise UserError(
                f"launch.bind=loopback, but launch.rendezvous={endpoint} is not on loopback; "
                "set launch.bind=all, or to this machine's address, to let other machines connect"
            )
        return bind
    if bind not in ("auto", "all"):
        return interface_address(bind) or bind
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return "auto"
    if is_loopback(host):
        return "loopback"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only asks the routing table
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"launch.rendezvous={endpoint}: cannot reach host {host!r} ({error})") from error
