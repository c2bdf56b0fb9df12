"""Choose the layers of a student: take away, one after the other, the layer that the outputs miss least.

The measure is the one that training minimises: forward KL from the whole model to the shortened one, on supervised rows
of the run's own texts. One pass costs only the layers after the one in question, since the states that enter it are
kept.

Each round need not try every layer. What a layer's removal costs rises as others go, with few exceptions, so the cost
found in an earlier round is taken as a floor: layers are tried in the order of their floors until the best one found
lies below all floors that are left (the lazy greedy rule of Minoux, "Accelerated greedy algorithms for maximizing
submodular set functions", 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.config.layers import KEY
from disaggkd_cli.data import MicroBatch
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head, fused_kd_loss
from disaggkd_cli.models.head import backbone_of, head_of, hidden_states
from disaggkd_cli.models.layers import decoder_layers


@dataclass(frozen=True)
class Removal:
    """One layer taken away.

    Attributes:
        layer: its number in the whole model.
        kd: forward KL in nats a row, from the whole model to what is left of it.
        tried: how many layers were tried before it was taken.
    """

    layer: int
    kd: float
    tried: int


@torch.no_grad()
def removals(model: nn.Module, batches: Sequence[MicroBatch], most_rows: int = 128) -> Iterator[Removal]:
    """Yield layers in the order in which they are best taken away, until one is left.

    Args:
        model: the teacher, a causal LM in eval mode; it is the same again afterwards.
        batches: texts of the run; with their supervised rows, of which each batch gives `most_rows` at most.
        most_rows: the head and its loss cost as much as many layers, so not every row is looked at.

    Raises:
        UserError: a layer returns more than one tensor; the texts have no supervised rows.
    """
    with _slots(model) as slots:
        probe = _Probe(model, slots, batches, most_rows)
        floors = dict.fromkeys(range(len(slots)), 0.0)
        while len(floors) > 1:
            probe.remember()
            found: dict[int, float] = {}
            for layer in sorted(floors, key=lambda number: (floors[number], number)):
                if found and min(found.values()) <= floors[layer]:
                    break
                found[layer] = probe.without(layer)
            floors |= found
            best = min(found, key=lambda number: (found[number], number))
            slots[best].kept = False
            del floors[best]
            yield Removal(best, found[best], len(found))


def best_layers(model: nn.Module, batches: Sequence[MicroBatch], keep: int, log: Callable[[str], None]) -> list[int]:
    """Return the numbers of the `keep` layers that are left, rising; each removal is logged with its loss.

    Raises:
        UserError: see `removals`.
    """
    count = len(decoder_layers(model)[1])
    gone: list[int] = []
    if keep < count:
        for removal in removals(model, batches):
            gone.append(removal.layer)
            log(
                f"layer {removal.layer} goes: {count - len(gone)} of {count} are left, KD {removal.kd:.4f} nats a row "
                f"({removal.tried} tried)"
            )
            if len(gone) == count - keep:
                break
    return sorted(set(range(count)) - set(gone))


class _Slot(nn.Module):
    """A layer that can be passed over, or entered by states from elsewhere instead of those before it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.kept = True
        self.passed = False
        self.enters: Tensor | None = None
        self.entered: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns, or the states themselves."""
        if self.enters is not None:
            states = self.enters
        self.entered = states
        if self.passed or not self.kept:
            return states
        out = self.layer(states, *args, **kwargs)
        if not isinstance(out, Tensor):
            raise UserError(
                f"{KEY}: best_N needs layers that return one tensor, and those of this model "
                f"return a {type(out).__name__}; name the layers, or every_N"
            )
        return out


@contextmanager
def _slots(model: nn.Module) -> Iterator[list[_Slot]]:
    layers = decoder_layers(model)[1]
    own = list(layers)
    slots = [_Slot(layer) for layer in own]
    for number, slot in enumerate(slots):
        layers[number] = slot
    try:
        yield slots
    finally:
        for number, layer in enumerate(own):
            layers[number] = layer


class _Probe:
    """The texts, what the whole model makes of them, and what enters each layer of the shortened one."""

    def __init__(self, model: nn.Module, slots: list[_Slot], batches: Sequence[MicroBatch], most_rows: int) -> None:
        self._backbone, self._head, self._slots = backbone_of(model), head_of(model), slots
        device = self._head.weight.device
        self._batches = [batch.to(device) for batch in batches if len(batch.rows)]
        if not self._batches:
            raise UserError(f"{KEY}: best_N needs supervised rows in the first texts of data.train")
        self._rows = [batch.rows[:: -(-len(batch.rows) // most_rows)] for batch in self._batches]
        self._whole = [self._states(index) for index in range(len(self._batches))]
        self._entering: list[list[Tensor]] = []

    def remember(self) -> None:
        """Keep what enters each layer of the model as it is shortened now."""
        self._entering = []
        for index in range(len(self._batches)):
            self._states(index)
            self._entering.append([slot.entered for slot in self._slots])

    def without(self, layer: int) -> float:
        """Return the loss in nats a row of the shortened model without `layer` too."""
        total = rows = 0.0
        for index in range(len(self._batches)):
            for slot in self._slots[: layer + 1]:
                slot.passed = True
            self._slots[layer].enters = self._entering[index][layer]
            hidden = self._states(index)
            self._slots[layer].enters = None
            for slot in self._slots[: layer + 1]:
                slot.passed = False
            total += self._kd(hidden, self._whole[index], self._head) * len(hidden)
            rows += len(hidden)
        return total / rows

    def _states(self, index: int) -> Tensor:
        batch = self._batches[index]
        states = hidden_states(self._backbone, batch.input_ids, batch.position_ids)
        return states.reshape(-1, states.shape[-1])[self._rows[index]]

    @staticmethod
    def _kd(student: Tensor, teacher: Tensor, head: Head) -> float:
        return fused_kd_loss(student, head, teacher, head, None, divergence="forward_kl").kd.item()
