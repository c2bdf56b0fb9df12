"""A cluster of one machine: SLURM's programs as stand-ins on PATH, and jobs to wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
STUB = Path(__file__).with_name("slurm_stub.py")
PROGRAMS = ("sbatch", "srun", "scontrol", "scancel")


class Cluster:
    """Submits scripts and looks at what became of them. Everything lies in `folder`, whose name holds spaces."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "state").mkdir()
        for program in PROGRAMS:
            path = folder / "bin" / program
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$0" "$@"\n')
            path.chmod(0o755)
        known = {name: value for name, value in os.environ.items() if not name.startswith(("DISAGGKD_", "SLURM_"))}
        self.environment = {
            **known,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_STUB": str(folder / "state"),
            "PYTHON": sys.executable,
            "DISAGGKD_HOME": str(ROOT),
            "RENDEZVOUS_HOST": "127.0.0.1",
            "BIND": "loopback",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def call(self, *command: str | Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess:
        """Run a program as a user of the cluster would."""
        done = subprocess.run(
            [str(word) for word in command], cwd=self.folder, env={**self.environment, **variables},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(self, *arguments: str | Path, tasks: str = "1", **variables: str) -> int:
        """Submit a script and return the job's number."""
        done = self.call("sbatch", "--parsable", *arguments, SLURM_STUB_TASKS=tasks, **variables)
        return int(done.stdout)

    def job(self, number: int, name: str) -> Path:
        """Return a file of what a job left."""
        return self.folder / "state" / "jobs" / str(number) / name

    def output(self, number: int) -> str:
        """Return what a job has printed so far."""
        return self.job(number, "output").read_text()

    def calls(self) -> list[str]:
        """Return the calls that the stand-ins wrote down."""
        path = self.folder / "state" / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a job's batch script a signal, as --signal=B: does."""
        os.kill(int(self.job(number, "pid").read_text()), what)

    def end(self) -> None:
        """Kill what is left of all jobs, each by the session that it was started in."""
        for session in (self.folder / "state").glob("jobs/*/session"):
            try:
                os.killpg(int(session.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended by itself

    def wait(self, number: int, seconds: float = 120) -> int:
        """Wait for a job's end and return its exit code."""
        code = self.job(number, "code")
        wait_until(lambda: code.exists() and code.read_text(), seconds, lambda: self.output(number))
        return int(code.read_text())


def wait_until(condition, seconds: float, tell) -> None:
    """Wait until `condition()` holds; fail with what `tell()` says after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.1)
