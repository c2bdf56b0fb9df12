"""Give a model without weights its own share of them, part by part: whole, or sharded over ranks by FSDP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from disaggkd_cli.models.parts import Part


@torch.no_grad()
def fill(module: nn.Module, parts: Iterator[Part], device: torch.device) -> None:
    """Put what `parts` bring in the place of the empty parameters and buffers of `module`, on `device`.

    Tensors that several modules share stay shared. A sharded parameter takes its rank's shard of the whole one.

    Args:
        module: its parameters are on `meta`; those of FSDP are DTensors.
        parts: whole tensors by name, in the module's dtypes.

    Raises:
        RuntimeError: the parts lack a tensor of the module.
    """
    _allocate(module, device)
    empty = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for part in parts:
        while part:
            name, whole = part.popitem()
            if (target := empty.pop(name, None)) is None:
                continue  # the other name of a tensor that two modules share
            if isinstance(target, DTensor):
                target.to_local().copy_(own_shard(whole, target))
            else:
                target.copy_(whole)
            del whole
    if empty:
        raise RuntimeError(f"nothing was read for {', '.join(sorted(empty)[:3])}")


def own_shard(whole: Tensor, sharded: DTensor) -> Tensor:
    """Return the part of `whole` that this rank keeps of a DTensor with these placements."""
    mesh = sharded.device_mesh
    for dimension, placement in enumerate(sharded.placements):
        if isinstance(placement, Shard):
            pieces = whole.chunk(mesh.size(dimension), placement.dim)
            rank = mesh.get_local_rank(dimension)
            whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Replace tensors without values by uninitialised ones; one that is there several times stays one."""
    found: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in found:
            fresh = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            found[id(tensor)] = fresh
        return found[id(tensor)]

    originals = []  # kept alive, so that no id is used twice
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    originals.append(tensor)
                    tensors[name] = real(tensor)


def from_rank_zero(parts: Iterator[Part] | None, like: nn.Module, group: dist.ProcessGroup) -> Iterator[Part]:
    """Yield on every rank of a group what its rank 0 has, a tensor at a time. Collective over the group.

    Args:
        parts: on rank 0, whole tensors by the names of `like`; None elsewhere.
        like: the model without weights: the names and shapes that all ranks know.
        group: works on tensors of the CPU.
    """
    source = dist.get_global_rank(group, 0)
    have: Part = {}
    for name, tensor in [*like.named_parameters(), *like.named_buffers()]:
        while parts is not None and name not in have:
            have |= next(parts)
        whole = have.pop(name).contiguous() if parts is not None else torch.empty_like(tensor, device="cpu")
        dist.broadcast(whole, source, group=group)
        yield {name: whole}
