"""The load-balancing loss of a mixture of experts: transformers' own function, at the student's own coefficient."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.errors import UserError

_FUNCTION = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterLoss:
    """What a model's routers are held to.

    Attributes:
        weight: its coefficient in the loss.
        function: transformers' own for the model's class.
        experts, per_token: experts of a layer, and how many of them each token goes to.
    """

    weight: float
    function: Callable[..., Tensor]
    experts: int
    per_token: int

    def __call__(self, router_logits: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Return the loss of one micro-batch: `experts · Σ_e (share of tokens sent to e) · (mean probability of e)`.

        Switch Transformer, equations 4 to 6, over all layers at once, as transformers computes it.

        Args:
            router_logits: [B * S, E] of each layer that has a router.
            mask: [B, S], 1 at tokens and 0 at padding; of nothing but padding the loss is zero.
        """
        if not mask.any():
            return router_logits[0].new_zeros((), dtype=torch.float32)
        return self.function(router_logits, self.experts, self.per_token, mask)


def router_loss_of(model: nn.Module, weight: float | None) -> RouterLoss | None:
    """Return the router loss to train `model` with, or None where it has none or the weight is 0.

    Args:
        model: a causal LM.
        weight: `student.router_aux_weight`; None takes the coefficient of the model's own configuration.

    Raises:
        UserError: a weight is given for a model whose class has no such loss.
    """
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    experts, per_token = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    known = function is not None and list(inspect.signature(function).parameters) == _PARAMETERS
    if not known or not experts or not per_token:
        if weight:
            raise UserError(
                f"student.router_aux_weight: {type(model).__name__} has no load-balancing loss of its routers in "
                "transformers; leave the key out"
            )
        return None
    own: Any = getattr(model, "router_aux_loss_coef", None)
    chosen = float(own or 0.0) if weight is None else weight
    return RouterLoss(chosen, function, int(experts), int(per_token)) if chosen else None
