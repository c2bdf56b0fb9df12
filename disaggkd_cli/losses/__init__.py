"""The distillation loss over a large vocabulary. Needs torch only; its cost model, `tiling`, not even that."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disaggkd_cli.losses.divergences import DIVERGENCES
    from disaggkd_cli.losses.fused import fused_kd_loss
    from disaggkd_cli.losses.heads import Head, shard_bounds
    from disaggkd_cli.losses.output import LossOutput
    from disaggkd_cli.losses.reference import reference_kd_loss

__all__ = ["DIVERGENCES", "Head", "LossOutput", "fused_kd_loss", "reference_kd_loss", "shard_bounds"]

_HOMES = {
    "DIVERGENCES": "divergences",
    "Head": "heads",
    "LossOutput": "output",
    "fused_kd_loss": "fused",
    "reference_kd_loss": "reference",
    "shard_bounds": "heads",
}


def __getattr__(name: str):
    # Loaded on first use, so that the planner can import `losses.tiling` without paying for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
