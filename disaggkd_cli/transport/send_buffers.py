"""Memory that a teacher's replies lie in until they are sent, shared by all its links."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class SendBuffers:
    """Buffers that are taken for a reply and given back when it has gone. Any thread may call.

    Args:
        device: where the teacher computes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._guard = threading.Lock()
        self._idle: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return uint8 of at least `size` bytes, uninitialised unless it is new."""
        with self._guard:
            large_enough = [index for index, buffer in enumerate(self._idle) if buffer.numel() >= size]
            if large_enough:
                return self._idle.pop(min(large_enough, key=lambda index: self._idle[index].numel()))
            if self._idle:
                self._idle.pop()  # too small: a larger one takes its place
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Let another reply have it."""
        with self._guard:
            self._idle.append(buffer)
