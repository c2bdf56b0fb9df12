"""The language-model head as the losses see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """A language-model head: `logits = cap(scale * (hidden @ weight.T + bias))`.

    `cap(z) = softcap * tanh(z / softcap)` where a soft cap is given, else the identity.

    Attributes:
        weight: [V, H].
        bias: [V] or None.
        scale: factor on the logits (`logit_scale`, or one over `logits_scaling`).
        softcap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def detached(self) -> Head:
        """Return this head without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return Head(self.weight.detach(), bias, self.scale, self.softcap)

    def rows(self, start: int, stop: int) -> Head:
        """Return the head of ids `start` to `stop - 1`, a view: what one rank of a vocabulary-parallel group holds."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Head(self.weight[start:stop], bias, self.scale, self.softcap)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; told by its attributes, since importing the class takes half a second."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def gathered(head: Head) -> Head:
    """Return a frozen head whose weight and bias are whole: those that are DTensors are gathered, by all ranks
    together."""

    def whole(tensor: Tensor | None) -> Tensor | None:
        return tensor.detach().full_tensor() if tensor is not None and is_dtensor(tensor) else tensor

    return Head(whole(head.weight), whole(head.bias), head.scale, head.softcap)


def apply_head(hidden: Tensor, head: Head) -> Tensor:
    """Return the logits [..., V] of `hidden` [..., H], in the dtype of the matrix product."""
    logits = F.linear(hidden, head.weight, head.bias)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


def shard_bounds(vocabulary: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return `(start, stop)`, the ids that `rank` of `ranks` holds: blocks of `ceil(vocabulary / ranks)`, the last
    ones short.

    Both heads of a vocabulary-parallel loss must be cut at the same ids. When their sizes differ, cut both at the
    bounds of
    the larger and let the smaller end early: `head.rows(start, min(stop, V))`.
    """
    block = -(-vocabulary // ranks)
    return min(rank * block, vocabulary), min((rank + 1) * block, vocabulary)
