"""Slots of a ring: where hidden states lie until the trainer is done with them, on the host or on a GPU.

On a GPU each slot has two events, so that neither side waits on the host for the other's kernels:
  filled   recorded by whoever wrote the slot; the trainer's stream waits for it before it reads,
  free     recorded on the trainer's stream when the lease is released; nobody is asked to fill the slot before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disaggkd_cli.transport.cuda import Cuda, wait_for_event

_ALIGNMENT = 64
"""Slots begin at multiples of this many bytes, so that a view in any wire dtype is aligned."""


class Slot:
    """One slot.

    Attributes:
        buffer: uint8, on the device where the student computes.
    """

    def __init__(self, buffer: Tensor, cuda: Cuda | None = None):
        self.buffer = buffer
        self._cuda = cuda
        self._host_buffer: Tensor | None = None
        self.filled = cuda.event() if cuda else None
        self.free = cuda.event() if cuda else None

    @property
    def host_buffer(self) -> Tensor:
        """Host memory where gloo puts the bytes: the slot itself, or a page-locked mirror of a slot on a GPU."""
        if self._cuda is None:
            return self.buffer
        if self._host_buffer is None:
            self._host_buffer = self._cuda.host_buffer(self.buffer.numel())
        return self._host_buffer

    def is_free(self, seconds: float) -> bool:
        """Return whether the kernels that read the slot last are done within so many seconds."""
        return self.free is None or wait_for_event(self.free, seconds)

    def open_for_reading(self) -> None:
        """Let the calling thread's stream wait until the slot is filled."""
        if self._cuda is not None:
            self._cuda.current_stream().wait_event(self.filled)

    def give_back(self) -> None:
        """Note on the calling thread's stream that it has read the slot for the last time."""
        if self._cuda is not None:
            self.free.record(self._cuda.current_stream())


def make_slots(depth: int, size: int, cuda: Cuda | None = None) -> list[Slot]:
    """Return `depth` slots of at least `size` bytes each, in one piece of memory."""
    aligned = -(-max(1, size) // _ALIGNMENT) * _ALIGNMENT
    whole = cuda.device_buffer(depth * aligned) if cuda else torch.zeros(depth * aligned, dtype=torch.uint8)
    slots = [Slot(buffer, cuda) for buffer in whole.split(aligned)]
    for slot in slots:
        slot.give_back()  # the allocator hands out memory that earlier kernels of this stream may still use
    return slots
