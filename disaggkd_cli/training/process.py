"""What a rank asks of its own process: was it told to stop, and how much memory did it take?"""

from __future__ import annotations

import os
import signal
import sys

import torch


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
