"""What each wire format does to the loss: hidden states sent and received against the same ones unsent, in float64."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from disaggkd_cli.losses import Head, reference_kd_loss
from disaggkd_cli.wire import FORMATS, WireFormat

_ROWS, _WIDTH, _VOCABULARY = 256, 512, 4096
_LOUD_CHANNELS, _LOUDNESS = 4, 30.0
"""Final hidden states of real models have a few channels far larger than the rest; float8 suffers from them."""


@dataclass(frozen=True)
class WireRow:
    """One wire format.

    Attributes:
        bytes_per_row: of a payload of `_WIDTH` values a row.
        loss_error: |loss - exact loss| / exact loss, for a forward KL of the size `kl`.
        gradient_error: relative error (norm) of the gradient of the student's hidden states.
        seconds_per_million: encode and decode of a million values on this CPU.
    """

    dtype: str
    kl: float
    bytes_per_row: int
    loss_error: float
    gradient_error: float
    seconds_per_million: float


def bench_wire(seed: int = 0) -> list[dict]:
    """Return a row for each wire format and for a student far from and near to its teacher, as plain dicts."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(_VOCABULARY, _WIDTH, generator=draw) / _WIDTH**0.5
    teacher = torch.randn(_ROWS, _WIDTH, generator=draw)
    teacher[:, :_LOUD_CHANNELS] *= _LOUDNESS
    weight[:, :_LOUD_CHANNELS] /= _LOUDNESS
    rows = []
    for distance in (1.0, 0.1):
        student = teacher + distance * torch.randn(_ROWS, _WIDTH, generator=draw)
        exact_loss, exact_gradient = _loss(student, teacher, weight)
        for name, wire in FORMATS.items():
            received, seconds = _send(teacher, wire)
            loss, gradient = _loss(student, received, weight)
            rows.append(
                WireRow(
                    dtype=name,
                    kl=exact_loss,
                    bytes_per_row=wire.bytes_per_row(_WIDTH),
                    loss_error=abs(loss - exact_loss) / exact_loss,
                    gradient_error=((gradient - exact_gradient).norm() / exact_gradient.norm()).item(),
                    seconds_per_million=seconds / (teacher.numel() / 1e6),
                )
            )
    return [asdict(row) for row in rows]


def format_wire_rows(rows: list[dict]) -> str:
    """Return the rows as the table that the command prints."""
    lines = [
        f"wire formats, {_WIDTH} values a row, forward KL in float64 of what arrives",
        f"{'format':>9} {'KL':>8} {'bytes/row':>9} {'loss error':>10} {'gradient error':>14} {'s per 1e6':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row['dtype']:>9} {row['kl']:>8.4f} {row['bytes_per_row']:>9} {row['loss_error']:>10.1e} "
            f"{row['gradient_error']:>14.1e} {row['seconds_per_million']:>9.4f}"
        )
    return "\n".join(lines)


def _send(hidden: Tensor, wire: WireFormat) -> tuple[Tensor, float]:
    buffer = torch.empty(wire.payload_bytes(*hidden.shape), dtype=torch.uint8)
    best, received = float("inf"), hidden
    for _ in range(3):
        started = time.perf_counter()
        received = wire.decode(wire.payload_of(hidden, buffer), *hidden.shape)
        best = min(best, time.perf_counter() - started)
    return received, best


def _loss(student_hidden: Tensor, teacher_hidden: Tensor, weight: Tensor) -> tuple[float, Tensor]:
    student = student_hidden.double().requires_grad_()
    head = Head(weight.double())
    out = reference_kd_loss(student, head, teacher_hidden.double(), head, compute_dtype=torch.float64)
    out.loss.backward()
    return out.loss.item(), student.grad
