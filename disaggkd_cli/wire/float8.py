"""Eight bits a value, with a scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disaggkd_cli.wire.format import WireFormat
from disaggkd_cli.wire.plain import all_finite

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_BYTES = 4
_LARGEST = 448.0
"""Of float8_e4m3fn."""


class ScaledFloat8(WireFormat):
    """One float32 scale a row in front: R*4 bytes of scales, then R*H bytes of float8_e4m3fn.

    scale = max|row| / 448, the largest e4m3 value. The student computes in bfloat16.
    """

    compute = "bfloat16"
    is_exact = False
    tolerance = 0.05

    def __init__(self, name: str, *, code: int):
        self.name = name
        self.code = code

    def bytes_per_row(self, width: int) -> int:
        """See `WireFormat.bytes_per_row`."""
        return width + _SCALE_BYTES

    def encode(self, hidden: Tensor, payload: Tensor) -> None:
        """See `WireFormat.encode`."""
        import torch

        scales, elements = _parts(payload, *hidden.shape)
        full = hidden.float()
        scale = full.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
        scales.copy_(scale)
        elements.copy_((full / scale[:, None]).clamp_(-_LARGEST, _LARGEST))

    def decode(self, payload: Tensor, rows: int, width: int) -> Tensor:
        """See `WireFormat.decode`: a fresh tensor."""
        scales, elements = _parts(payload, rows, width)
        return (elements.float() * scales[:, None]).to(self.compute_dtype())

    def is_finite(self, payload: Tensor, rows: int, width: int) -> bool:
        """See `WireFormat.is_finite`: every scale and every element."""
        import torch

        scales, elements = _parts(payload, rows, width)
        largest = (elements.view(torch.uint8) & 0x7F).amax() if elements.numel() else 0
        return all_finite(scales) and int(largest) < 0x7F  # e4m3fn has no infinity; its NaNs are 0x7F and 0xFF


def _parts(payload: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    import torch

    split = rows * _SCALE_BYTES
    return payload[:split].view(torch.float32), payload[split:].view(torch.float8_e4m3fn).view(rows, width)
