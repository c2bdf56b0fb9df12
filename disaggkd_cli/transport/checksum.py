"""The checksum of bodies and payloads."""

from __future__ import annotations

import zlib

from torch import Tensor


def payload_checksum(payload: Tensor) -> int:
    """Return the crc32 of a CPU uint8 tensor. zlib releases the interpreter lock for it."""
    return zlib.crc32(memoryview(payload.numpy()))
