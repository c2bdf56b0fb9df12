"""Draw token ids by the inverse of the cumulative distribution, after transformers' own processors of logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampler:
    """What distribution tokens are drawn from.

    Attributes:
        temperature, top_p, top_k: as in `on_policy`; a top_k of 0 and a top_p of 1 leave all ids.
        ids: ids from here on are never drawn: the tokenizer or the teacher lacks them.
    """

    temperature: float
    top_p: float
    top_k: int
    ids: int

    @cached_property
    def _processors(self) -> LogitsProcessorList:
        found = LogitsProcessorList()
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            found.append(TopPLogitsWarper(self.top_p))
        return found

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, V] float64: what tokens are drawn from, given logits [B, V] at temperature 1."""
        scores = logits.float().clone()
        scores[:, self.ids :] = -torch.inf
        return torch.softmax(self._processors(None, scores).double(), dim=-1)


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """[B] int64: of each row of [B, V] the first id at which the cumulated probability is above its number.

    Args:
        probabilities: [B, V] float64; they need not sum to 1 exactly.
        numbers: [B] float64 in [0, 1).
    """
    cumulated = probabilities.cumsum(-1)
    # Scaled to the sum as it was rounded, so that every number finds an id whose probability is above 0.
    wanted = numbers[:, None] * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(found, last)


def entropy(probabilities: Tensor) -> Tensor:
    """[B] float64 nats of each row of [B, V]."""
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)
