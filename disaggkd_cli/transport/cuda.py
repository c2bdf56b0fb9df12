"""What the payload channels need of one CUDA device: streams, events, page-locked memory. Tests put a stand-in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

POLL_SECONDS = (2e-5, 1e-3)
"""A wait for an event looks first after the one, then ever less often, down to the other."""


class Streams:
    """Streams of one device that links borrow and give back: torch has 32 in all, and then hands them out again.

    Args:
        make: makes one more.
    """

    def __init__(self, make: Callable[[], torch.cuda.Stream]):
        self._make = make
        self._guard = threading.Lock()
        self._idle: list[torch.cuda.Stream] = []
        self._inspecting: torch.cuda.Stream | None = None

    def borrow(self) -> torch.cuda.Stream:
        """Return a stream that nobody else has."""
        with self._guard:
            return self._idle.pop() if self._idle else self._make()

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Let another link have it; all that it was given is over, or what comes next may run behind it."""
        with self._guard:
            self._idle.append(stream)

    def inspecting(self) -> torch.cuda.Stream:
        """Return the one stream on which all links look at what has come."""
        with self._guard:
            self._inspecting = self._inspecting or self._make()
            return self._inspecting


_streams: dict[torch.device, Streams] = {}
_streams_guard = threading.Lock()


class Cuda:
    """One device. Every method may be called from any thread."""

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def streams(self) -> Streams:
        """The device's streams for links, the same for the whole process."""
        with _streams_guard:
            return _streams.setdefault(self.device, Streams(lambda: torch.cuda.Stream(self.device)))

    def enter_thread(self) -> None:
        """Make the device the calling thread's own: else what it leaves or allocates opens a context on device 0."""
        torch.cuda.set_device(self.device)

    def event(self) -> torch.cuda.Event:
        """Return a new event; one that was never recorded counts as done."""
        return torch.cuda.Event(blocking=True)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream that the calling thread computes on."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        """Make `stream` and its device the calling thread's current ones for a while."""
        return torch.cuda.stream(stream)

    def host_buffer(self, size: int) -> Tensor:
        """Return page-locked host memory, which copies to and from the device need in order not to block."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size: int) -> Tensor:
        """Return memory of the device."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the current stream; the host side of it is page-locked.

        Both may be dropped before it has run: their memory is used again only after it.
        """
        target.copy_(source, non_blocking=True)
        for side in (target, source):
            if side.is_cuda:
                side.record_stream(self.current_stream())

    def finish(self) -> None:
        """Wait until all that the calling thread has asked of its current stream is done."""
        event = self.event()
        event.record(self.current_stream())
        event.synchronize()


def device_thread(cuda: Cuda | None, target: Callable[..., None], name: str, arguments: tuple = ()) -> threading.Thread:
    """Return a daemon thread, not yet started, whose current device is that of `cuda`; None: any thread."""

    def run() -> None:
        if cuda is not None:
            cuda.enter_thread()
        target(*arguments)

    return threading.Thread(target=run, name=name, daemon=True)


def cuda_of(device: torch.device) -> Cuda | None:
    """Return the streams and events of a CUDA device, or None for the CPU."""
    return Cuda(device) if device.type == "cuda" else None


def wait_for_event(event: torch.cuda.Event, seconds: float, gone: Callable[[], bool] = lambda: False) -> bool:
    """Return whether `event` is done within so many seconds; False early when `gone()`.

    Polls, since CUDA's own waits have no bound.
    """
    deadline = time.monotonic() + seconds
    pause, longest = POLL_SECONDS
    while not event.query():
        if gone() or time.monotonic() >= deadline:
            return bool(event.query())
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
