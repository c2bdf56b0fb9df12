"""Peak memory of a piece of work: bytes allocated through torch while it ran, beyond those before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import profile


def peak_extra_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run `work` once and return the most bytes that it held at a time through torch's allocator.

    On CUDA the allocator's own peak; on CPUs every allocation and release that the profiler sees, in order. Buffers
    that libraries allocate for themselves (packing buffers of a matrix product) are not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    record = profile(use_cpu=True, profile_memory=True)
    with _silent_stderr():
        record.__enter__()
    try:
        work()
    finally:
        with _silent_stderr():
            record.__exit__(*sys.exc_info())
    events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep what the profiler's C++ side prints at its start and stop off the terminal."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
