"""A whole copy of the student on each of its ranks, for as long as a window is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GatheredStudent:
    """The student without weights, which takes them for a while.

    Args:
        model: the student as built, before it is sharded, checkpointed or compiled.
        dtype: that it computes in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        empty = {id(one): _without_values(one) for one in tensors}
        self._model = copy.deepcopy(model, empty).eval()
        self._dtype = dtype
        self._places: dict[int, list[tuple[dict, str]]] = {}
        for module in self._model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        self._places.setdefault(id(tensor), []).append((slots, name))
        self._tensors = dict([*self._model.named_parameters(), *self._model.named_buffers()])

    @property
    def model(self) -> nn.Module:
        """The copy, which has weights inside `with_weights` only."""
        return self._model

    @contextmanager
    def with_weights(self, trained: nn.Module) -> Iterator[nn.Module]:
        """Give the copy what `trained` weighs now, one tensor after the other. Collective over the student ranks.

        On one rank in the same dtype nothing is copied: both share their weights.
        """
        try:
            for name, tensor in [*trained.named_parameters(), *trained.named_buffers()]:
                self._put(self._tensors[name], self._whole(tensor.detach()))
            yield self._model
        finally:
            for tensor in self._tensors.values():
                self._put(tensor, tensor)

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # Cast first: half as much travels, and no tensor is ever whole in float32.
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor).full_tensor()

    def _put(self, empty: Tensor, value: Tensor) -> None:
        for slots, name in self._places[id(empty)]:
            if isinstance(empty, nn.Parameter) and not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            slots[name] = value


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
