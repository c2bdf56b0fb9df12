"""What a run leaves on disk, and where: config, environment, status, metrics, logs, checkpoints, the export."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from disaggkd_cli import __version__, files
from disaggkd_cli.errors import UserError
from disaggkd_cli.locks import Lock, Taken
from disaggkd_cli.terminal import write
from disaggkd_cli.training.step_lines import read_step_lines

EXPORTS_OF_STEPS = "student_step_*"
"""What `disaggkd export` writes besides, where a step is named."""


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
    def lock(self) -> Path:
        """Held by the one process that may write here."""
        return self.root / "lock"

    @property
    def secret(self) -> Path:
        """By which student and teachers know each other."""
        return self.root / "secret"

    @property
    def layers(self) -> Path:
        """The layers that `best_N` came to."""
        return self.root / "layers.json"

    @property
    def samples(self) -> Path:
        """What the models wrote to fixed prompts, a line each."""
        return self.root / "samples.jsonl"

    @property
    def export(self) -> Path:
        """The finished student as a Hugging Face model directory."""
        return self.root / "student"

    def parts(self) -> tuple[Path, ...]:
        """Return every path above but the lock: all that a run leaves by itself."""
        named = (getattr(self, name) for name, one in vars(RunDirectory).items() if isinstance(one, property))
        return tuple(path for path in named if path != self.lock)


def hold(root: str | Path, job: str) -> Lock | None:
    """Hold a run directory against other starts until the returned lock is closed, or this process ends.

    Returns None, with a word on stderr, where the file system has no locks.

    Raises:
        UserError: another process works in it, or it cannot be written to.
    """
    directory = RunDirectory(Path(root).expanduser())
    _make(directory, root)
    try:
        return Lock(directory.lock, job)
    except Taken as taken:
        raise UserError(
            f"run_dir: {root} is taken by {str(taken) or 'another run'}; wait until that one has ended, stop it, or "
            "choose another run_dir"
        ) from None
    except OSError as error:
        warning = f"warning: run_dir: {root} cannot be locked ({error.strerror})"
        write(f"{warning}: see to it that no other run starts there while this one goes", sys.stderr)
        return None


def _make(directory: RunDirectory, root: str | Path) -> None:
    """Make a run directory that can be written to.

    Raises:
        UserError: it cannot be.
    """
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        probe = directory.root / ".writable"
        probe.write_text("")
        probe.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"run_dir: {root} is a file, or lies below one; name a directory") from None
    except OSError as error:
        raise UserError(f"run_dir: {root} cannot be written to: {error.strerror}; choose another run_dir") from None


def log_path(directory: RunDirectory, name: str) -> Path:
    """Return the log file of the process called `name`, such as `student 0`."""
    return directory.logs / f"{name.replace(' ', '_')}.log"


def prepare(root: str | Path, config_yaml: str, *, resume: bool) -> RunDirectory:
    """Create the run directory, or check that an existing one may be gone on with, and write the resolved config.

    What a start has left that failed before its first step is in nobody's way: it is removed, but for the logs.

    Raises:
        UserError: when it cannot be written, or holds another run and `resume` is off.
    """
    directory = RunDirectory(Path(root).expanduser())
    _make(directory, root)
    if directory.status.exists() and not resume:
        if not failed_before_its_first_step(directory):
            raise UserError(
                f"run_dir: {root} already holds a run ({describe(directory)}); add --resume auto to go on with it, "
                "--overwrite to delete it, or choose another run_dir"
            )
        clear(directory, logs=False)
    directory.config.write_text(config_yaml, encoding="utf-8")
    return directory


def failed_before_its_first_step(directory: RunDirectory) -> bool:
    """Whether what lies there is a start that ended in a failure and trained nothing."""
    status = read_status(directory)
    if status is None or status.state != "failed" or status.last_step or status.resumable:
        return False
    return not any(directory.checkpoints.glob("*")) and not directory.export.exists() and _last_step(directory) == 0


def clear(directory: RunDirectory, *, logs: bool = True) -> None:
    """Delete what a run has left in its directory, and nothing else that lies there.

    Raises:
        UserError: the run still goes on this machine, or something cannot be deleted.
    """
    status = read_status(directory)
    if status is not None and status.state == "running" and status.alive_here():
        raise UserError(
            f"run_dir: {directory.root}: the run there still goes (process {status.process}); stop it first"
        )
    names = [entry.name for entry in (*directory.parts(), *directory.root.glob(EXPORTS_OF_STEPS))]
    try:
        for path in (directory.root / name for name in names):
            if path == directory.logs and not logs:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        directory.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir: {error.filename} cannot be deleted: {error.strerror}") from None


def describe(directory: RunDirectory) -> str:
    """Return how the run there stands, in a few words, such as `finished after step 30`."""
    status = read_status(directory)
    if status is None:
        return "its status.json cannot be read"
    if status.state == "running":
        how = "going" if status.alive_here() else "said to be going"
        return f"{how}, after step {max(status.last_step, _last_step(directory))}"
    return f"{status.state} after step {status.last_step}"


def _last_step(directory: RunDirectory) -> int:
    """Return the last step that metrics.jsonl has a line of, 0 without any."""
    try:
        lines, _ = read_step_lines(directory.metrics)
    except OSError:
        return 0
    return max((line["step"] for line in lines), default=0)


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
        # Relative paths of the config are meant from here; `report` reads the models' shapes again for its plan.
        "working_directory": os.getcwd(),
    }
    _replace(directory.environment, environment)


@dataclass
class Status:
    """How a run stands: `state` is running, finished, stopped (saved, can resume) or failed.

    Attributes:
        process, host, written: which process of which machine wrote it, and when (seconds since 1970).
        teacher_stages: of pipeline teachers, what each stage recorded last, with the most requests that its replica
            lets in at a time; see `stage_record.StageRecord`.
        changed: settings that differ from those of the checkpoint it went on from, and what that means.
        other_bits: teachers that compute other bits than the first one, and served: not reproducible bit for bit.
    """

    state: str
    exit_code: int | None = None
    reason: str = ""
    last_step: int = 0
    resumable: bool = False
    process: int = 0
    host: str = ""
    written: float = 0.0
    teacher_stages: list[dict[str, Any]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    other_bits: list[str] = field(default_factory=list)

    def alive_here(self) -> bool:
        """Whether the process that wrote it still lives, as far as this machine can see."""
        if not self.process or self.host != platform.node():
            return False
        try:
            # A process that began later has only taken the number over.
            return psutil.Process(self.process).create_time() <= self.written + 1
        except psutil.Error:
            return False

    def write(self, directory: RunDirectory) -> None:
        """Replace `status.json` in one move. A disk that refuses it is logged; it must not hide why a run ended."""
        self.process, self.host, self.written = os.getpid(), platform.node(), time.time()
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
