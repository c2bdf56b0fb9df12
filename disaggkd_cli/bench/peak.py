"""Peak memory of a piece of work: bytes allocated through torch while it ran, beyond those before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

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
    with redirect_stderr(StringIO()) if not sys.flags.dev_mode else redirect_stderr(sys.stderr):
        with profile(use_cpu=True, profile_memory=True) as record:
            work()
    events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
