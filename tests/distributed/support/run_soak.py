"""A seeded soak of whole runs: two teachers, two student ranks, and a fault every 10 to 30 seconds.

    python tests/distributed/support/run_soak.py [SECONDS=3600] [SEED=1]

An undisturbed run of as many steps comes first and takes about a fifth of SECONDS. Faults: SIGKILL and SIGSTOP (shorter
and longer than `transport.timeout`) of a teacher or a student rank, SIGKILL and SIGTERM of the supervisor (the run is
started again with `--resume auto`), a checkpoint that is damaged on the disk, a metrics file whose end is lost, a
process that impersonates a teacher, one that writes nonsense over the rendezvous. Prints each fault as it is done; then
whether the weights are those of the undisturbed run, what is left of the run's processes, and how memory, descriptors
and threads of the ranks changed in time. Exits 1 if anything is off.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.support.runs import descendants, process_ids, status, weights_sha256, write_config  # noqa: E402

TIMEOUT = 6
STEP_SECONDS = 0.25
WARM_SECONDS = 60
"""Of a process's life that its slopes leave out: what it loads and allocates at its start."""
SHORTEST_SECONDS = 60
BOUNDS = {"MiB": 48.0, "descriptors": 12, "threads": 12}
"""By how much a rank may grow over its life after it has warmed up; a link that is formed anew is a few of each."""
ENDS_STUDENTS = {
    "kill a student rank", "kill the supervisor", "ask the run to stop", "damage a checkpoint",
    "lose the end of the metrics",
}  # fmt: skip
"""Faults of the first half only: in the second one the students live on, so that one sees whether they grow."""
INTRUDER = Path(__file__).with_name("intruder.py")


@dataclass
class Watched:
    """What one process held, second by second."""

    role: str
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def growth(self) -> tuple[float, dict[str, float]] | None:
        """Return the minutes that were looked at, and what least squares say that each figure grew by in them."""
        begun = self.samples[0][0] + WARM_SECONDS
        kept = [one for one in self.samples if one[0] >= begun]
        if len(kept) < 3 or kept[-1][0] - kept[0][0] < SHORTEST_SECONDS:
            return None
        seconds = [one[0] - kept[0][0] for one in kept]
        names = ("MiB", "descriptors", "threads")
        slopes = {
            name: statistics.linear_regression(seconds, [one[place] for one in kept]).slope
            for place, name in enumerate(names, start=1)
        }
        return seconds[-1] / 60, {name: slope * seconds[-1] for name, slope in slopes.items()}


class Soak:
    """One disturbed run."""

    def __init__(self, config: Path, run: Path, steps: int, seed: int) -> None:
        self.config, self.run, self.steps = config, run, steps
        self.draw = random.Random(seed)
        self.faults: dict[str, int] = defaultdict(int)
        self.watched: dict[int, Watched] = {}
        self.starts = 0
        self.began = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self.log = (run.parent / "output.txt").open("ab")
        self.start()

    def start(self) -> None:
        command = [
            sys.executable, "-m", "disaggkd_cli", "run", str(self.config), f"run_dir={self.run}",
            f"train.steps={self.steps}", f"launch.rendezvous={self.endpoint}", "--resume", "auto", "--restarts", "9999",
        ]  # fmt: skip
        slowly = f"student 0.before_commit:sleep:{STEP_SECONDS}"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": slowly}
        self.job = subprocess.Popen(command, env=variables, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        self.starts += 1

    def end(self) -> None:
        """Let it come to its end, starting it again wherever it has stopped; return once it has finished."""
        while self.job.poll() != 0:
            if self.job.returncode is not None:
                self.start_again()
            self.look()
            time.sleep(1)

    def start_again(self) -> None:
        deadline = time.monotonic() + 30
        while descendants(str(self.run)) and time.monotonic() < deadline:
            time.sleep(0.2)
        if self.job.returncode not in (0, 75, -signal.SIGKILL):
            raise AssertionError(f"the run ended with {self.job.returncode}:\n{self.said()}")
        self.start()

    def said(self) -> str:
        return (self.run.parent / "output.txt").read_text(errors="replace")[-3000:]

    def look(self) -> None:
        for role in ("student", "teacher"):
            for pid in process_ids(role, str(self.run)):
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    held = dict(line.split(":", 1) for line in lines)
                    memory, threads = int(held["VmRSS"].split()[0]) / 1024, int(held["Threads"])
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                except (OSError, KeyError):
                    continue  # it has just ended
                self.watched.setdefault(pid, Watched(role)).samples.append((time.monotonic(), memory, files, threads))

    def disturb(self, *, spare_students: bool) -> None:
        """Do one fault."""
        faults = {
            "kill a teacher": lambda: self.signal("teacher", signal.SIGKILL),
            "stop a teacher briefly": lambda: self.stop("teacher", TIMEOUT / 3),
            "stop a teacher for long": lambda: self.stop("teacher", TIMEOUT * 1.5),
            "kill a student rank": lambda: self.signal("student", signal.SIGKILL),
            "stop a student rank briefly": lambda: self.stop("student", TIMEOUT / 3),
            "kill the supervisor": lambda: self.job.send_signal(signal.SIGKILL),
            "ask the run to stop": lambda: self.job.send_signal(signal.SIGTERM),
            "damage a checkpoint": self.damage,
            "lose the end of the metrics": self.cut,
            "impersonate a teacher": lambda: self.intrude("impersonate", 8),
            "write nonsense over the rendezvous": lambda: self.intrude("garbage", 2),
        }
        kept = [name for name in faults if not (spare_students and name in ENDS_STUDENTS)]
        name = self.draw.choice(kept)
        self.faults[name] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  {name}", file=sys.stderr, flush=True)
        faults[name]()

    def signal(self, role: str, number: int) -> int | None:
        pids = sorted(process_ids(role, str(self.run)))
        if not pids:
            return None
        pid = self.draw.choice(pids)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    def stop(self, role: str, seconds: float) -> None:
        pid = self.signal(role, signal.SIGSTOP)
        time.sleep(seconds)
        if pid is not None:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    def damage(self) -> None:
        """Change a byte of the newest checkpoint and have the student start again: it must take the one before."""
        done = sorted(self.run.glob("checkpoints/step_*"))
        if len(done) < 2:
            return
        for file in sorted(done[-1].glob("*.safetensors"))[:1]:
            with file.open("r+b") as stream:
                stream.seek(-9, os.SEEK_END)
                byte = stream.read(1)
                stream.seek(-9, os.SEEK_END)
                stream.write(bytes([byte[0] ^ 1]))
        self.signal("student", signal.SIGKILL)

    def cut(self) -> None:
        """Kill the supervisor and take half a line from the end of its metrics."""
        self.job.send_signal(signal.SIGKILL)
        self.job.wait()
        metrics = self.run / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size > 200:
            os.truncate(metrics, metrics.stat().st_size - 100)

    def intrude(self, what: str, seconds: int) -> None:
        command = [sys.executable, str(INTRUDER), self.endpoint, what, str(seconds)]
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def soak(seconds: float, seed: int) -> dict:
    """Run one soak and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        return _soak(Path(folder), seconds, seed)


def _soak(folder: Path, seconds: float, seed: int) -> dict:
    steps = max(40, int(seconds / (2 * STEP_SECONDS)))
    settings = {"teacher__replicas": 2, "student__ranks": 2, "transport__timeout": TIMEOUT, "train__save_every": 10}
    config = write_config(folder / "run.yaml", **settings, train__eval_every=40, train__micro_batch_sequences=2)
    plain = [sys.executable, "-m", "disaggkd_cli", "run", str(config), f"run_dir={folder}/plain"]
    quiet = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*plain, f"train.steps={steps}"], check=True, **quiet)
    (folder / "disturbed").mkdir()
    one = Soak(config, folder / "disturbed" / "run", steps, seed)
    try:
        until = one.began + seconds
        while time.monotonic() < until and one.job.poll() != 0:
            pause = time.monotonic() + one.draw.uniform(10, 30)
            while time.monotonic() < min(pause, until):
                if one.job.poll() not in (None, 0):
                    one.start_again()
                one.look()
                time.sleep(1)
            if one.job.poll() is None and time.monotonic() < until:
                one.disturb(spare_students=time.monotonic() > one.began + seconds / 2)
        one.end()
    finally:
        one.job.kill()
        one.log.close()
    grown = [(found.role, *growth) for found in one.watched.values() if (growth := found.growth())]
    return {
        "seconds": time.monotonic() - one.began,
        "steps": steps,
        "faults": dict(sorted(one.faults.items())),
        "starts": one.starts,
        "same_weights": weights_sha256(folder / "plain") == weights_sha256(one.run),
        "state": status(one.run)["state"],
        "left": len(descendants(str(one.run))),
        "watched": {role: sum(1 for other, *_ in grown if other == role) for role in ("student", "teacher")},
        "longest_minutes": max((minutes for _, minutes, _ in grown), default=0.0),
        "largest_growth": {name: max((by[name] for *_, by in grown), default=0.0) for name in BOUNDS},
    }


def is_clean(figures: dict) -> bool:
    """Return whether a soak lost nothing, changed nothing, left nothing and grew by no more than it may."""
    flat = all(figures["largest_growth"][name] <= most for name, most in BOUNDS.items())
    return figures["same_weights"] and figures["state"] == "finished" and not figures["left"] and flat


def main(arguments: list[str]) -> int:
    seconds, seed = float(arguments[0]) if arguments else 3600.0, int(arguments[1]) if len(arguments) > 1 else 1
    figures = soak(seconds, seed)
    print(json.dumps(figures, indent=2))
    return 0 if is_clean(figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
