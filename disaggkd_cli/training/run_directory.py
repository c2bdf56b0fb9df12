"""What a run leaves on disk, and where: config, environment, status, metrics, logs, checkpoints, the export."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli import __version__, files
from disaggkd_cli.errors import UserError


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine and command line."""
        return self.root / "environment.json"

    @property
    def status(self) -> Path:
        """How the run stands or ended."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """One file a rank."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files, where tensorboard is installed."""
        return self.root / "tensorboard"

    @property
    def trackers(self) -> Path:
        """By which ids trackers know this run, for when it is resumed."""
        return self.root / "trackers.json"

    @property
    def export(self) -> Path:
        """The finished student as a Hugging Face model directory."""
        return self.root / "student"


def log_path(directory: RunDirectory, name: str) -> Path:
    """Return the log file of the process called `name`, such as `student 0`."""
    return directory.logs / f"{name.replace(' ', '_')}.log"


def prepare(root: str | Path, config_yaml: str, *, resume: bool) -> RunDirectory:
    """Create the run directory, or check that an existing one may be gone on with, and write the resolved config.

    Raises:
        UserError: when it cannot be written, or holds another run and `resume` is off.
    """
    directory = RunDirectory(Path(root).expanduser())
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        probe = directory.root / ".writable"
        probe.write_text("")
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"run_dir: {root} is a file, or lies below one; name a directory") from None
    except OSError as error:
        raise UserError(f"run_dir: {root} cannot be written to: {error.strerror}; choose another run_dir") from None
    if directory.status.exists() and not resume:
        raise UserError(
            f"run_dir: {root} already holds a run; add --resume auto to go on with it, or choose another run_dir"
        )
    directory.config.write_text(config_yaml, encoding="utf-8")
    return directory


def write_environment(directory: RunDirectory, versions: dict[str, str], placement: dict[str, Any]) -> None:
    """Record what this run was started with; no secrets: only named variables are recorded."""
    recorded = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "SLURM_JOB_ID")
    environment = {
        "disaggkd": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions,
        "placement": placement,
        "variables": {name: os.environ[name] for name in recorded if name in os.environ},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    _replace(directory.environment, environment)


@dataclass
class Status:
    """How a run stands: `state` is running, finished, stopped (saved, can resume) or failed."""

    state: str
    exit_code: int | None = None
    reason: str = ""
    last_step: int = 0
    resumable: bool = False

    def write(self, directory: RunDirectory) -> None:
        """Replace `status.json` in one move. A disk that refuses it is logged; it must not hide why a run ended."""
        try:
            _replace(directory.status, asdict(self))
        except OSError as error:
            logging.getLogger("disaggkd").warning("%s could not be written: %s", directory.status, error.strerror)


def read_status(directory: RunDirectory) -> Status | None:
    """Return the recorded status, or None when there is none that can be read."""
    try:
        return Status(**json.loads(directory.status.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _replace(path: Path, content: dict[str, Any]) -> None:
    files.write_text(path, json.dumps(content, indent=2) + "\n")
