"""Peak bytes of the reference loss, forward and backward, as MemTracker counts them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from disaggkd_cli.losses import Head, reference_kd_loss


class _Loss(nn.Module):
    def __init__(self, divergence: str, rows: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, 8))
        self.hidden = torch.randn(rows, 8, requires_grad=True)
        self.teacher = (torch.randn(rows, 8), Head(torch.randn(vocabulary, 8)))
        self.divergence = divergence

    def forward(self) -> torch.Tensor:
        labels = torch.zeros(len(self.hidden), dtype=torch.int64)
        hidden, head = self.teacher
        return reference_kd_loss(self.hidden, Head(self.weight), hidden, head, labels, divergence=self.divergence).loss


def peak_of_reference(divergence: str, rows: int, vocabulary: int) -> int:
    """Bytes at the fullest moment."""
    module, tracker = _Loss(divergence, rows, vocabulary), MemTracker()
    tracker.track_external(module, module.hidden)
    with tracker:
        module().backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return next(value for key, value in snapshot.items() if str(key).endswith("Total"))
