"""Texts that all ranks of a group tell each other, without pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gathered_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks of a group, by rank. Collective, on the CPU.

    Args:
        group: all ranks by default.

    Raises:
        RuntimeError: as torch's collectives do.
    """
    ranks = dist.get_world_size(group)
    data = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)  # no tensor is made of no bytes
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    widest = max(int(size) for size in sizes)
    padded = [torch.zeros(widest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(padded, torch.nn.functional.pad(data, (0, widest - data.numel())), group=group)
    return [whole[: int(size) - 1].numpy().tobytes().decode() for whole, size in zip(padded, sizes, strict=True)]
