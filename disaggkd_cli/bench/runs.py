"""Start real `disaggkd run` jobs as children, watch what their ranks take, and read how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.training.process import GPU_CAP

MODES = ("colocated_full", "colocated_fused", "disaggregated_fused")
_SAMPLE_SECONDS = 0.05
_TIDY_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has glibc give freed memory back at once, so that a limit on a process is a limit on its tensors."""

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "memoryerror",
    "bad_alloc",
    "not enough memory",
)


@dataclass
class Watched:
    """What a job's ranks took, by role (`student`, `teacher`): the largest of its ranks.

    Attributes:
        code: the job's exit code.
        output: what it printed.
        resident_bytes: highest resident memory of a rank, as the kernel counts it (VmHWM).
        training_bytes: the same from the first step to the last, loading, saving and exporting left out; sampled, and
            only where a `stage` is given.
        data_bytes: highest private writable memory of a rank (VmData), which RLIMIT_DATA limits; sampled.
        stopped: the job did not end by itself: `until` was true, or its time was up.
    """

    code: int
    output: str
    resident_bytes: dict[str, int] = field(default_factory=dict)
    training_bytes: dict[str, int] = field(default_factory=dict)
    data_bytes: dict[str, int] = field(default_factory=dict)
    stopped: bool = False


def mode_overrides(config: Config, mode: str) -> list[str]:
    """Return the overrides that turn `config` into one of `MODES`, with the same number of ranks and global batch.

    Colocated modes put the student on all ranks that the disaggregated run has, teachers' ranks included.

    Raises:
        UserError: the global batch cannot be shared out among all ranks.
    """
    apart = config.student.ranks + config.teacher.replicas * config.teacher.ranks_per_replica
    if mode == "disaggregated_fused":
        return ["mode=disaggregated", "loss.implementation=fused"]
    micro, rest = divmod(config.global_batch_sequences, apart * config.train.accumulation)
    if rest or micro < 1:
        raise UserError(
            f"train.micro_batch_sequences: a step of {config.global_batch_sequences} sequences in "
            f"{config.train.accumulation} micro-batches cannot be shared by the {apart} ranks of a colocated run; make "
            f"student.ranks x train.micro_batch_sequences a multiple of {apart}"
        )
    implementation = mode.removeprefix("colocated_")
    return [
        "mode=colocated",
        f"student.ranks={apart}",
        f"train.micro_batch_sequences={micro}",
        f"loss.implementation={implementation}",
    ]


def watch_run(
    arguments: Sequence[str],
    *,
    timeout: float,
    data_limits: dict[str, int] | None = None,
    limit_from: Callable[[], bool] | None = None,
    until: Callable[[], bool] | None = None,
    training: Callable[[], bool] | None = None,
    tidy_allocator: bool = False,
    gpu_cap: int | None = None,
) -> Watched:
    """Run `disaggkd run` with `arguments` to its end, sampling its ranks' memory.

    Args:
        arguments: config, overrides and options.
        timeout: seconds after which the job is ended.
        data_limits: bytes of private writable memory that a rank may have, by role; the kernel refuses more.
        limit_from: asked all the time; the limit is set on the ranks once it is true, rather than from their start
            (where the largest of the limits is everyone's). What they took before that is forgotten then.
        until: asked all the time; once true, enough is known and the job is ended.
        tidy_allocator: have freed memory given back at once, so that what a rank takes is what it uses; slower. Always
            so under `data_limits`.
        gpu_cap: bytes that each rank's tensors may take on its GPU, from its start.
        training: asked all the time: whether steps are being done. Peaks are counted anew when it becomes true.

    Raises:
        RunError: the job did not end in time, and there was no `until` that it could end by.
    """

    limited = data_limits is not None and limit_from is None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISAGGKD_")}
    watched = Watched(-1, "")
    counted_anew = False
    deadline = time.monotonic() + timeout
    extra = dict(_TIDY_ALLOCATOR) if tidy_allocator or data_limits is not None else {}
    if gpu_cap is not None:
        extra[GPU_CAP] = str(gpu_cap)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "disaggkd_cli", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**environment, "COLUMNS": "200", **extra},
            preexec_fn=functools.partial(_prepare_child, max(data_limits.values()) if limited else None),
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < deadline and not (until and until()):
                if data_limits is not None and limit_from is not None and limit_from():
                    _limit_ranks(process.pid, data_limits)
                    watched.data_bytes.clear()
                    limit_from = None
                now_training = training is not None and training()
                if now_training and not counted_anew:
                    _forget_peaks(process.pid)
                    counted_anew = True
                _sample(process.pid, watched, now_training)
                time.sleep(_SAMPLE_SECONDS)
        finally:
            watched.stopped = process.poll() is None
            if watched.stopped:
                process.kill()  # its ranks die with it
                process.wait()
        printed.seek(0)
        watched.output = printed.read()
    if watched.stopped and until is None:
        raise RunError(f"a run of the bench did not end within {timeout:.0f} s:\n{watched.output[-2000:]}")
    watched.code = process.returncode
    return watched


def _prepare_child(data_limit: int | None) -> None:
    # Linux: a job must not outlive a bench that is killed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if data_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))


def _limit_ranks(parent: int, data_limits: dict[str, int]) -> None:
    for child in psutil.Process(parent).children():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            limit = data_limits.get(child.environ().get("DISAGGKD_ROLE", ""))
            if limit is not None:
                resource.prlimit(child.pid, resource.RLIMIT_DATA, (limit, limit))


def _forget_peaks(parent: int) -> None:
    """Have the kernel count the resident peaks of all ranks from here on (Linux, `proc(5)`: clear_refs)."""
    for child in psutil.Process(parent).children():
        with contextlib.suppress(OSError):
            Path(f"/proc/{child.pid}/clear_refs").write_text("5")


def _sample(parent: int, watched: Watched, training: bool) -> None:
    try:
        children = psutil.Process(parent).children()
    except psutil.Error:
        return
    for child in children:
        try:
            role = child.environ().get("DISAGGKD_ROLE")
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        except (psutil.Error, OSError):
            continue  # it has just ended, or there is no /proc here
        if role is None:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        wanted = [("VmHWM", watched.resident_bytes), ("VmData", watched.data_bytes)]
        for name, taken in [*wanted, *([("VmHWM", watched.training_bytes)] if training else [])]:
            if name in fields:
                taken[role] = max(taken.get(role, 0), int(fields[name].split()[0]) * 1024)


def out_of_memory(logs: Path, output: str = "") -> str | None:
    """Return the name of the rank that ran out of memory by its log or the job's output; None when none did."""
    for path in sorted([*logs.glob("*.log"), *logs.glob("*.out")]) if logs.is_dir() else []:
        text = path.read_text(encoding="utf-8", errors="replace").lower()
        if any(sign in text for sign in _OUT_OF_MEMORY):
            return path.stem.replace("_", " ")
    text = output.lower()
    return "student 0" if any(sign in text for sign in _OUT_OF_MEMORY) else None


def machine() -> dict[str, object]:
    """Return what the measurements were made on."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the plain name is all there is
    import torch

    return {
        "processor": name,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


Log = Callable[[str], None]
