"""What the transport's process tests share: a fake teacher that anybody can recompute, and its requests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from disaggkd_cli.transport import Request

WIDTH = 24
NOTABLE_ROWS = (195, 186, 1, 0)


def make_request(number: int, seed: int, sequence: int = 100, every_row: bool = False) -> Request:
    """Return request `number` of the stream `seed`: [2, S] tokens in two documents a row, 0..2S rows (or all)."""
    draw = random.Random(f"{seed}/{number}")
    tokens = torch.tensor([[draw.randrange(1000) for _ in range(sequence)] for _ in range(2)], dtype=torch.int32)
    lengths = []
    for _ in range(2):
        first = draw.randrange(1, sequence)
        lengths += [first, sequence - first]
    count = NOTABLE_ROWS[number % 7] if number % 7 < len(NOTABLE_ROWS) else draw.randrange(2 * sequence)
    count = 2 * sequence if every_row else count
    rows = sorted(draw.sample(range(2 * sequence), min(count, 2 * sequence)))
    return Request(number, tokens, torch.tensor(lengths, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32))


def make_requests(start: int, stop: int, seed: int, sequence: int = 100, every_row: bool = False) -> Iterator[Request]:
    """Yield requests `start` to `stop` of the stream."""
    for number in range(start, stop):
        yield make_request(number, seed, sequence, every_row)


def fake_hidden(request: Request, width: int = WIDTH) -> Tensor:
    """Return [R, width] float32 that depend on each row's token and place, exact in every 16-bit float."""
    ids = request.input_ids.reshape(-1).long()[request.rows.long()]
    mixed = ids[:, None] * 31 + request.rows.long()[:, None] * 7 + torch.arange(width)[None] * 13
    return ((mixed % 255) - 127).float() / 64
