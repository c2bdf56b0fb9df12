"""Whether a student's routers are trained with a load-balancing loss, without a look at its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disaggkd_cli.planner.models.shapes import ExpertMLP, ModelShape

_WITH_LOSS = (
    "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "jamba", "jetmoe",
    "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""model_type of classes that have one in transformers 5.24; what a run relies on is the class (`models/router.py`)."""


def balances_experts(shape: ModelShape, fields: Mapping[str, Any], weight: float | None) -> bool:
    """Return whether a run adds the loss.

    Args:
        shape: the student.
        fields: of its config.json.
        weight: `student.router_aux_weight`; None takes the coefficient of `fields` and, where they have none, the
            class's own, which is above zero.
    """
    if shape.model_type.removesuffix("_text") not in _WITH_LOSS or not router_sizes(shape):
        return False
    own = (fields.get("text_config") or fields).get("router_aux_loss_coef")
    chosen = own if weight is None else weight
    return chosen is None or chosen > 0


def router_sizes(shape: ModelShape) -> list[int]:
    """The experts of each layer that has a router."""
    return [layer.mlp.experts for layer in shape.layers if isinstance(layer.mlp, ExpertMLP)]
