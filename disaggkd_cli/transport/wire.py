"""Hidden states as bytes: the wire dtypes, payload sizes, checksum and finiteness.

A payload of R rows and width H is R*H elements of the wire dtype. `float8` carries one float32 scale a row in front:
R*4 bytes of scales, then R*H bytes of float8_e4m3fn, with scale = max|row| / 448 (the largest e4m3 value).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from disaggkd_cli.errors import UserError

WIRE_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
"""Names that `transport.dtype` takes. The position is the code in headers."""

_CODES = {name: code for code, name in enumerate(WIRE_DTYPES, start=1)}
_SCALE_BYTES = 4
FLOAT8_LARGEST = 448.0


def wire_code(name: str) -> int:
    """Return the header's number for a wire dtype.

    Raises:
        UserError: for a name that is none of `WIRE_DTYPES`.
    """
    if name not in _CODES:
        raise UserError(f"transport.dtype={name!r} is not a wire dtype; choose one of {', '.join(WIRE_DTYPES)}")
    return _CODES[name]


def payload_bytes(rows: int, width: int, name: str) -> int:
    """Return the exact size in bytes of a payload of `rows` x `width`."""
    scales = rows * _SCALE_BYTES if name == "float8" else 0
    return rows * width * WIRE_DTYPES[name].itemsize + scales


def encode_payload(hidden: Tensor, name: str, buffer: Tensor) -> Tensor:
    """Return `hidden` [R, H] as payload bytes on the device of `buffer`.

    A contiguous tensor there that has the wire dtype already is returned as it lies in memory, without a copy; anything
    else is written into the front of `buffer` (uint8). Values beyond float16's range become infinite and are
    caught by the receiver's finiteness check.
    """
    rows, width = hidden.shape
    if needs_no_buffer(hidden, name, buffer.device):
        return hidden.detach().reshape(-1).view(torch.uint8)
    payload = buffer[: payload_bytes(rows, width, name)]
    if name != "float8":
        payload.view(WIRE_DTYPES[name]).view(rows, width).copy_(hidden)
        return payload
    scales, elements = _float8_parts(payload, rows, width)
    full = hidden.float()
    scale = full.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny * FLOAT8_LARGEST) / FLOAT8_LARGEST
    scales.copy_(scale)
    elements.copy_((full / scale[:, None]).clamp_(-FLOAT8_LARGEST, FLOAT8_LARGEST))
    return payload


def needs_no_buffer(hidden: Tensor, name: str, device: torch.device) -> bool:
    """Return whether `hidden` can be sent from where it lies, by a link that sends from `device`."""
    in_wire_dtype = name != "float8" and hidden.dtype == WIRE_DTYPES[name]
    return in_wire_dtype and hidden.device == device and hidden.is_contiguous()


def decode_payload(payload: Tensor, rows: int, width: int, name: str) -> Tensor:
    """Return hidden states [R, H]: a view of `payload` in the wire dtype, or a fresh bfloat16 tensor for float8."""
    if name != "float8":
        return payload.view(WIRE_DTYPES[name]).view(rows, width)
    scales, elements = _float8_parts(payload, rows, width)
    return (elements.float() * scales[:, None]).to(torch.bfloat16)


def payload_checksum(payload: Tensor) -> int:
    """Return the crc32 of a CPU uint8 tensor. zlib releases the interpreter lock for it."""
    return zlib.crc32(memoryview(payload.numpy()))


def payload_is_finite(payload: Tensor, rows: int, width: int, name: str) -> bool:
    """Return whether every value of the payload is finite (float8: every scale and every element)."""
    if name == "float8":
        scales, elements = _float8_parts(payload, rows, width)
        largest = (elements.view(torch.uint8) & 0x7F).amax() if elements.numel() else 0
        return _is_finite(scales) and int(largest) < 0x7F  # e4m3fn has no infinity; its NaNs are 0x7F and 0xFF
    return _is_finite(payload.view(WIRE_DTYPES[name]))


def _is_finite(values: Tensor) -> bool:
    if values.numel() == 0:
        return True
    # NaN passes through minimum and maximum, so the two settle it: some 60 times faster than isfinite(values).all().
    smallest, largest = torch.aminmax(values)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


def _float8_parts(payload: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    split = rows * _SCALE_BYTES
    return payload[:split].view(torch.float32), payload[split:].view(torch.float8_e4m3fn).view(rows, width)
