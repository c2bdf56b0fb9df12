"""What a rank asks of its own process: was it told to stop, and how much memory did it take? And a record of that."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from disaggkd_cli import files
from disaggkd_cli.training.memory_record import MemoryRecord, record_path

GPU_CAP = "DISAGGKD_GPU_MEMORY_CAP"
"""Variable of the environment: bytes that a rank's tensors may take on its GPU. `bench frontier` sets it."""

_BETWEEN_RECORDS = 2.0
"""Seconds between two writings of a rank's memory record."""


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a wish that is read at the step boundary; a second one quits at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: allocated on the GPU, or resident on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_for_this_process(device: torch.device) -> int:
    """Return how much of a GPU's memory others leave to this process, within its cap; 0 on CPUs, where nobody asks."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), int(os.environ.get(GPU_CAP, total)))


def cap_gpu_memory(device: torch.device) -> int | None:
    """Have torch's allocator refuse more than `GPU_CAP` bytes on a GPU; return the cap, or None where there is none."""
    wanted = os.environ.get(GPU_CAP)
    if wanted is None or device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, int(wanted) / total), device)
    return int(wanted)


def keep_memory_record(logs: Path, rank: str, device: torch.device) -> None:
    """Write this process's `MemoryRecord` to `logs` now, every other second, and when the process ends.

    The process that starts a rank anew writes its own over it.
    """
    path = record_path(logs, rank)
    start = psutil.Process().memory_info().rss

    def write() -> None:
        record = MemoryRecord(rank, str(device), start, _peak(device, start))
        try:
            files.write_text(path, json.dumps(asdict(record)))
        except OSError:
            return  # a full or vanished disk costs this figure, not the run

    def repeat() -> None:
        while True:
            time.sleep(_BETWEEN_RECORDS)
            write()

    write()
    atexit.register(write)
    threading.Thread(target=repeat, name="memory record", daemon=True).start()


def _peak(device: torch.device, start: int) -> int:
    peak = peak_memory_bytes(device)
    return peak if device.type == "cuda" else max(peak, start)  # the kernel's high-water mark may lag a little behind
