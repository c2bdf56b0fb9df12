"""Collectives over whole tensors, by the name that the installed torch gives them (torch 2.13 renamed two)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather(everyone: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `everyone` [ranks · n, …] with each rank's `own` [n, …], in the order of ranks."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, own, group=group)


def reduce_scatter(own: Tensor, everyone: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `own` [n, …] with this rank's part of the sum over ranks of `everyone` [ranks · n, …]."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, everyone, group=group)
