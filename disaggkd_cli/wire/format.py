"""What a wire format is. Formats import torch where they touch a tensor: the planner asks for sizes alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WireFormat(ABC):
    """How hidden states [R, H] travel as bytes.

    Attributes:
        name: in the configuration and in the handshake.
        code: in headers.
        compute: name of the torch dtype of what `decode` returns, in which the student computes.
        is_exact: whether decoding returns the hidden states rounded to `compute`, bit for bit.
        tolerance: largest relative error (norm) of what is not exact, against the hidden states as they were.
    """

    name: str
    code: int
    compute: str
    is_exact: bool = True
    tolerance: float = 0.0

    @abstractmethod
    def bytes_per_row(self, width: int) -> int:
        """Return the bytes of a row of `width` values."""

    @abstractmethod
    def encode(self, hidden: Tensor, payload: Tensor) -> None:
        """Write `hidden` [R, H], of any float dtype, into `payload`, uint8 of exactly its size on any device."""

    @abstractmethod
    def decode(self, payload: Tensor, rows: int, width: int) -> Tensor:
        """Return the hidden states [rows, width] in `compute`: a view of `payload` (uint8) where that can be."""

    @abstractmethod
    def is_finite(self, payload: Tensor, rows: int, width: int) -> bool:
        """Return whether every value of the payload is finite."""

    def lies_ready(self, hidden: Tensor) -> bool:
        """Return whether the memory of `hidden` holds its payload as it is."""
        return False

    def payload_bytes(self, rows: int, width: int) -> int:
        """Return the exact size in bytes of a payload of `rows` x `width`."""
        return rows * self.bytes_per_row(width)

    def compute_dtype(self) -> torch.dtype:
        """Return `compute` as torch's."""
        import torch

        return getattr(torch, self.compute)

    def needs_buffer(self, hidden: Tensor, device: torch.device) -> bool:
        """Return whether sending `hidden` from `device` needs a copy of it."""
        return hidden.device != device or not self.lies_ready(hidden)

    def payload_of(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Return `hidden` [R, H] as payload bytes on the device of `buffer`.

        What lies ready there is returned as it lies, without a copy; anything else is written into the front of
        `buffer` (uint8). Values beyond the format's range become infinite and are caught by the receiver.
        """
        import torch

        if not self.needs_buffer(hidden, buffer.device):
            return hidden.detach().reshape(-1).view(torch.uint8)
        payload = buffer[: self.payload_bytes(*hidden.shape)]
        self.encode(hidden, payload)
        return payload
