"""Starts, watches, disturbs and ends the processes of a transport test. Signals go only to pids recorded here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transport_parts import WIDTH, fake_hidden, make_requests

from disaggkd_cli.transport import open_store

SUPPORT = Path(__file__).parent
WIRE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def expected_digest(start: int, stop: int, seed: int = 1, sequence: int = 100, width: int = WIDTH) -> str:
    """Return the sha256 of everything an undisturbed student gets delivered in bfloat16."""
    digest = hashlib.sha256()
    for request in make_requests(start, stop, seed, sequence):
        digest.update(request.request_id.to_bytes(8, "little"))
        digest.update(fake_hidden(request, width).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Peer:
    """One process of the test and the files it writes."""

    def __init__(self, script: str, arguments: list[str], folder: Path, environment: dict[str, str]):
        self.name = arguments[0]
        self._out = open(folder / f"{time.monotonic_ns()}.out", "w+")
        self._err = open(folder / f"{time.monotonic_ns()}.err", "w+")
        self.process = subprocess.Popen(
            [sys.executable, str(SUPPORT / script), *arguments],
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
        )
        self.pid = self.process.pid

    def errors(self) -> str:
        return Path(self._err.name).read_text()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def result(self, seconds: float = 60) -> dict:
        """Wait for the end and return the JSON record that the process printed last."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s:\n{self.errors()[-3000:]}") from None
        text = Path(self._out.name).read_text()
        assert code == 0 and text.strip(), f"{self.name} ended with {code}:\n{self.errors()[-3000:]}"
        return json.loads(text.strip().splitlines()[-1])

    def await_line(self, part: str, seconds: float = 30) -> None:
        """Wait until the process has written a line with `part` to its standard error."""
        deadline = time.monotonic() + seconds
        while part not in self.errors():
            assert self.process.poll() is None, f"{self.name} ended before {part!r}:\n{self.errors()[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} never said {part!r}:\n{self.errors()[-3000:]}"
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._out.close()
        self._err.close()


class Peers:
    """A rendezvous store in the test's own process, and the processes around it."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or Path(tempfile.mkdtemp())
        self.store = open_store("127.0.0.1:0", host_it=True)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.all: list[Peer] = []

    def teacher(self, number: int = 0, fault: str = "", **options) -> Peer:
        environment = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": fault} if fault else {}
        return self._start("transport_teacher.py", f"teacher {number}", environment, options)

    def student(self, rank: int = 0, **options) -> Peer:
        return self._start("transport_student.py", str(rank), {}, options)

    def _start(self, script: str, role: str, environment: dict[str, str], options: dict) -> Peer:
        endpoint = options.pop("endpoint", self.endpoint)
        pairs = [f"{key}={value}" for key, value in options.items()]
        peer = Peer(script, [role, endpoint, *pairs], self.folder, environment)
        self.all.append(peer)
        return peer

    def listening_addresses(self) -> set[str]:
        """Return every address on which a running process of the test listens."""
        found = set()
        for peer in self.all:
            if peer.process.poll() is None:
                connections = psutil.Process(peer.pid).net_connections(kind="inet")
                found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def end(self) -> None:
        for peer in self.all:
            if peer.process.poll() is None:
                peer.signal(signal.SIGCONT)
        for peer in self.all:
            peer.end()
