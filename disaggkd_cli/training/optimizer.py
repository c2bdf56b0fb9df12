"""AdamW over the student's float32 master weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from disaggkd_cli.config import TrainConfig


def build_optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return fused AdamW; weight decay falls on matrices only, not on norms and biases."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=tuple(train.adam_betas), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` at the next step."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(module: nn.Module, clip_norm: float) -> Tensor:
    """Return the global gradient norm, a scalar on the gradients' device, after scaling them down to `clip_norm` when
    that is above 0."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    limit = clip_norm if clip_norm > 0 else float("inf")
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
