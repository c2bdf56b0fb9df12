"""Starts, watches, disturbs and ends the processes of a transport test. Signals go only to pids recorded here."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transport_parts import WIDTH, fake_hidden, make_requests

from disaggkd_cli.transport import open_store

SUPPORT = Path(__file__).parent
sys.path.insert(0, str(SUPPORT.parents[2]))  # for scripts that are started by their path
from tests.support.warm import WarmPopen  # noqa: E402


def expected_digest(
    start: int, stop: int, seed: int = 1, sequence: int = 100, width: int = WIDTH, rows: str = ""
) -> str:
    """Return the sha256 of everything that an undisturbed student started with these options gets, in bfloat16."""
    digest = hashlib.sha256()
    for request in make_requests(start, stop, seed, sequence, every_row=rows == "all"):
        digest.update(request.request_id.to_bytes(8, "little"))
        digest.update(fake_hidden(request, width).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Peer:
    """One process of the test and the files it writes.

    Processes are forked from one that has torch imported already; with `fresh` they start as a user's would, behind the
    command `prefix`.
    """

    def __init__(self, script: str, arguments: list[str], folder: Path, environment: dict, fresh: bool, prefix=()):
        self.name = arguments[0]
        self._out = folder / f"{time.monotonic_ns()}.out"
        self._err = folder / f"{time.monotonic_ns()}.err"
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
        command = [*prefix, sys.executable, str(SUPPORT / f"{script}.py"), *arguments]
        with open(self._out, "w") as out, open(self._err, "w") as err:
            starting = subprocess.Popen if fresh else WarmPopen
            self._process = starting(command, stdout=out, stderr=err, env={**os.environ, **environment})
        self.pid = self._process.pid

    def errors(self) -> str:
        return self._err.read_text()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()

    def await_end(self, seconds: float = 30) -> int:
        """Wait for the end and return the exit code."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None:
            assert time.monotonic() < deadline, f"{self.name} still runs after {seconds} s:\n{self.errors()[-3000:]}"
            time.sleep(0.01)
        return code

    def result(self, seconds: float = 60) -> dict:
        """Wait for the end and return the JSON record that the process printed last."""
        code = self.await_end(seconds)
        text = self._out.read_text() if self._out.exists() else ""
        assert code == 0 and text.strip(), f"{self.name} ended with {code}:\n{self.errors()[-3000:]}"
        return json.loads(text.strip().splitlines()[-1])

    def await_line(self, part: str, seconds: float = 30) -> None:
        """Wait until the process has written a line with `part` to its standard error."""
        deadline = time.monotonic() + seconds
        while part not in self.errors():
            assert self.exit_code() is None, f"{self.name} ended before {part!r}:\n{self.errors()[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} never said {part!r}:\n{self.errors()[-3000:]}"
            time.sleep(0.01)

    def end(self) -> None:
        if self.exit_code() is None:
            self.signal(signal.SIGKILL)
            self.await_end()


def listening_addresses_of(pid: int) -> set[str]:
    """Return every address on which a running process listens, read in its own network namespace."""
    return {address for address, _ in listening_endpoints_of(pid)}


def listening_endpoints_of(pid: int) -> set[tuple[str, int]]:
    """Return every address and port on which a running process listens, read in its own network namespace."""
    found = set()
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                words, port = bytes.fromhex(local.split(":")[0]), int(local.split(":")[1], 16)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add((str(ipaddress.ip_address(packed)).removeprefix("::ffff:"), port))
    return found


def listening_addresses(peers: list[Peer]) -> set[str]:
    """Return every address on which one of `peers` listens."""
    return set().union(*(listening_addresses_of(peer.pid) for peer in peers if peer.exit_code() is None))


class Peers:
    """A rendezvous store in the test's own process, and the processes around it."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or Path(tempfile.mkdtemp())
        self.store = open_store("127.0.0.1:0", host_it=True)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.all: list[Peer] = []

    def teacher(self, number: int = 0, fault: str = "", **options) -> Peer:
        environment = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": fault} if fault else {}
        return self._start("transport_teacher", f"teacher {number}", environment, options)

    def student(self, rank: int = 0, **options) -> Peer:
        return self._start("transport_student", str(rank), {}, options)

    def _start(self, script: str, role: str, environment: dict[str, str], options: dict) -> Peer:
        endpoint, fresh = options.pop("endpoint", self.endpoint), options.pop("fresh", False)
        pairs = [f"{key}={value}" for key, value in options.items()]
        peer = Peer(script, [role, endpoint, *pairs], self.folder, environment, fresh)
        self.all.append(peer)
        return peer

    def listening_addresses(self) -> set[str]:
        """Return every address on which a running process of the test listens."""
        return listening_addresses(self.all)

    def end(self) -> None:
        for peer in self.all:
            if peer.exit_code() is None:
                peer.signal(signal.SIGCONT)
        for peer in self.all:
            peer.end()
