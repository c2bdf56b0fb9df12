"""Peak bytes of the reference loss, forward and backward, as MemTracker counts them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss


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


class _Fused(nn.Module):
    def __init__(self, rows: int, vocabulary: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width, dtype=dtype))
        self.hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
        self.teacher = torch.randn(rows, width, dtype=dtype)
        self.teacher_weight = torch.randn(vocabulary, width, dtype=dtype)

    def forward(self, divergence: str, budget: int) -> torch.Tensor:
        heads = Head(self.weight), Head(self.teacher_weight)
        options = {"divergence": divergence, "memory_budget": budget, "compile_pointwise": False}
        return fused_kd_loss(self.hidden, heads[0], self.teacher, heads[1], None, **options).loss


def peak_of_fused(divergence: str, rows: int, vocabulary: int, width: int, budget: int, dtype_bytes: int) -> int:
    """Bytes at the fullest moment of the fused loss, its inputs apart."""
    module, tracker = _Fused(rows, vocabulary, width, {2: torch.bfloat16, 4: torch.float32}[dtype_bytes]), MemTracker()
    inputs = (module.hidden, module.teacher, module.teacher_weight)
    tracker.track_external(module, *inputs)
    with tracker:
        module(divergence, budget).backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total = next(value for key, value in snapshot.items() if str(key).endswith("Total"))
    return total - sum(tensor.nbytes for tensor in (*inputs, module.weight))
