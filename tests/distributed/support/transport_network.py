"""Two hosts on one machine: network namespaces joined by a wire in user space
that delays and can be cut; the rate is kept by the kernel's token bucket. Needs root.

`python tests/distributed/support/transport_network.py` prints how much of a delay and of a bandwidth limit the ring
hides. The addresses 192.0.2.1 and 192.0.2.2 (reserved for documentation) exist inside the namespaces only.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ADDRESSES = ("192.0.2.1", "192.0.2.2")
PORT = 29611
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000


def unavailable() -> str:
    """Return why namespaces cannot be had here, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True)
    return "" if probe.returncode == 0 else f"`ip netns` does not work: {probe.stderr.decode().strip()}"


class TwoHosts:
    """Namespaces `names[0]` and `names[1]` with one address each, and the wire between them.

    Args:
        delay: seconds that each packet takes in each direction.
        rate: bytes per second in each direction; None is unlimited.
    """

    def __init__(self, delay: float = 0.0, rate: float | None = None):
        self.names = tuple(f"disaggkd-{os.getpid()}-{side}" for side in "ab")
        for name in self.names:
            _ip("netns", "add", name)
        context = multiprocessing.get_context("spawn")
        ready, self._cut = context.Event(), context.Event()
        self._rate = rate
        order = (self.names, delay, ready, self._cut)
        self._wire = context.Process(target=carry_packets, args=order, daemon=True)
        self._wire.start()
        try:
            self._bring_up(ready)
        except Exception:
            self.close()
            raise

    def _bring_up(self, ready) -> None:
        if not ready.wait(30):
            raise RuntimeError("the wire between the namespaces did not come up")
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "mtu", str(_MTU))
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if self._rate is not None:
                bits = str(round(8 * self._rate))
                shape = ["root", "tbf", "rate", bits, "burst", "256kb", "latency", "200ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "wire", *shape], check=True)

    def prefix(self, host: int) -> list[str]:
        """Return what to put before a command to run it on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        """Drop every packet, silently, as a broken switch does."""
        self._cut.set()

    def heal(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self._wire.kill()
        self._wire.join(10)
        for name in self.names:
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def carry_packets(names: tuple[str, str], delay: float, ready, cut) -> None:
    """Carry packets between a TUN device in each namespace, forever."""
    devices = [_open_tun(name) for name in names]
    ready.set()
    queues: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
    while True:
        now = time.monotonic()
        due = min((queue[0][0] for queue in queues if queue), default=now + 1.0)
        readable, _, _ = select.select(devices, [], [], max(0.0, due - now))
        now = time.monotonic()
        for side, device in enumerate(devices):
            if device in readable:
                packet = os.read(device, _MTU + 64)
                if cut.is_set():
                    continue
                queues[side].append((now + delay, packet))
        for side, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                with contextlib.suppress(OSError):  # the other end is not up yet: the packet is lost, as on any wire
                    os.write(devices[1 - side], packet)


def _open_tun(namespace: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"wire", _IFF_TUN | _IFF_NO_PI))
    return device


def measure_step(delay: float, rate: float | None, depth: int, pause: float = 0.05, steps: int = 30) -> float:
    """Return seconds per step of a student and a teacher that wait `pause` each, with 2 MiB payloads on such a wire."""
    from transport_peers import Peer

    hosts = TwoHosts(delay, rate)
    endpoint = f"{ADDRESSES[0]}:{PORT}"
    shape = ["width=2048", "sequence=256", "timeout=20", f"pause={pause}", "bind=all", "rows=all"]
    shape += ["check=no", "ones=512"]
    folder = Path(tempfile.mkdtemp())
    peers = []
    try:
        student = [*shape, "host=yes", f"depth={depth}", f"stop={steps}"]
        peers.append(Peer("transport_student", ["0", endpoint, *student], folder, {}, True, hosts.prefix(0)))
        peers.append(Peer("transport_teacher", ["teacher 0", endpoint, *shape], folder, {}, True, hosts.prefix(1)))
        return peers[0].result(120)["step_seconds"]
    finally:
        for peer in peers:
            peer.end()
        hosts.close()


def main() -> None:
    reason = unavailable()
    if reason:
        sys.exit(reason)
    print("teacher 50 ms and student 50 ms a step, payloads of 2 MiB; ms a step")
    print(f"{'delay':>8} {'rate':>12} {'2 MiB takes':>12} {'depth 1':>8} {'depth 2':>8} {'depth 4':>8}")
    for delay, rate in ((0, None), (0.01, None), (0, 50e6), (0, 25e6), (0, 12.5e6)):
        steps = [1000 * measure_step(delay, rate, depth) for depth in (1, 2, 4)]
        limit = f"{8 * rate / 1e6:.0f} Mbit/s" if rate else "none"
        travel = f"{1000 * 2**21 / rate:.0f} ms" if rate else "-"
        cells = " ".join(f"{step:>8.1f}" for step in steps)
        print(f"{1000 * delay:>5.0f} ms {limit:>12} {travel:>12} {cells}", flush=True)


if __name__ == "__main__":
    main()
