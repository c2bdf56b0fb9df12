"""Start real runs of `disaggkd` as a user would, and read what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.warm import WarmPopen

TINY_TEACHER = Path(__file__).parents[1] / "assets" / "tiny-austen"

TINY_CONFIG: dict[str, Any] = {
    "teacher": {"model": str(TINY_TEACHER), "dtype": "float32"},
    "student": {"from_teacher": {"layers": "every_2"}},
    "data": {"train": "builtin:pydoc", "sequence_length": 48, "eval_sequences": 8},
    "train": {
        "steps": 20,
        "micro_batch_sequences": 4,
        "warmup_steps": 2,
        "schedule": "constant",
        "learning_rate": 1.0e-3,
        "eval_every": 8,
        "save_every": 7,
    },
    "transport": {"dtype": "float32", "timeout": 20, "teacher_wait": 60},
    "launch": {"threads": 1},
    "log": {"samples": 0},  # tests that count requests count those of the training
    "export": {"dtype": "float32"},  # so that the hash of an export is that of every bit of the weights
}


def write_config(path: Path, **changes: Any) -> Path:
    """Write the tiny config with dotted `changes` (`train__steps=2`) and return the file."""
    config = json.loads(json.dumps(TINY_CONFIG))
    for name, value in changes.items():
        *sections, key = name.split("__")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    path.write_text(yaml.safe_dump(config))
    return path


def start(arguments: list[str], fresh: bool = False, **variables: str) -> subprocess.Popen:
    """Start `disaggkd` with `arguments`, its stderr and stdout joined.

    Its processes are forked from one that has everything imported; `fresh` ones start as a user's would, each with its
    own order of sets.
    """
    return _start(arguments, subprocess.STDOUT, fresh, variables)


def _start(arguments: Sequence[str], errors: int, fresh: bool, variables: dict[str, str]) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISAGGKD_")}
    return (subprocess.Popen if fresh else WarmPopen)(
        [sys.executable, "-m", "disaggkd_cli", *arguments],
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables},
        stdout=subprocess.PIPE,
        stderr=errors,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 180) -> tuple[int, str]:
    """Wait for a started command and return its exit code and output; one that hangs is ended by its process id."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output[-4000:]}") from None
    return process.returncode, output


def disaggkd(*arguments: str, timeout: float = 180, fresh: bool = False, **variables: str) -> tuple[int, str]:
    """Run `disaggkd` to its end and return its exit code and output."""
    return finish(start(list(arguments), fresh, **variables), timeout)


def disaggkd_apart(*arguments: str, timeout: float = 180) -> tuple[int, str, str]:
    """Run `disaggkd` to its end and return its exit code, its standard output, and its standard error."""
    process = _start(arguments, subprocess.PIPE, False, {})
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output, errors


def run_to_end(config: Path, run_dir: Path, *arguments: str, fresh: bool = False) -> Path:
    """Run a whole job, which must succeed, and return its run directory."""
    code, output = disaggkd("run", str(config), f"run_dir={run_dir}", *arguments, fresh=fresh)
    assert code == 0, output
    return run_dir


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """Return the loss of each training step."""
    return [line["loss"] for line in metrics(run_dir) if "loss" in line]


def status(run_dir: Path) -> dict[str, Any]:
    """Return a run's recorded status."""
    return json.loads((run_dir / "status.json").read_text())


def weights_sha256(run_dir: Path) -> str:
    """Return the hash of the exported student's weights."""
    return hashlib.sha256((run_dir / "student" / "model.safetensors").read_bytes()).hexdigest()


def descendants(pattern: str) -> list[int]:
    """Return the process ids whose command line mentions `pattern` (a run directory of this test, say)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if pattern in command:
                found.append(int(entry.name))
    return found


def process_ids(role: str, pattern: str) -> list[int]:
    """Return the process ids of a role's ranks (`teacher`, `student`) of the run that mentions `pattern`."""
    found = []
    for number in descendants(pattern):
        try:
            variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"DISAGGKD_ROLE={role}".encode() in variables:
            found.append(number)
    return sorted(found)
