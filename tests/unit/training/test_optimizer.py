"""The optimizer decays matrices only, and clips only where that is asked for."""

import pytest
import torch
from torch import nn

from disaggkd_cli.config import TrainConfig
from disaggkd_cli.training.optimizer import build_optimizer, clip_gradients, set_learning_rate


def module():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    made[2].bias.data.normal_()
    return made


def test_decay_falls_on_matrices_only():
    made = module()
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    optimizer = build_optimizer(made, TrainConfig(learning_rate=0.1, weight_decay=0.5))
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in made.named_parameters():
        kept = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), kept * before[name], msg=name)


def test_what_is_frozen_is_not_trained():
    made = module()
    made[0].weight.requires_grad_(False)
    groups = build_optimizer(made, TrainConfig()).param_groups
    assert sum(len(group["params"]) for group in groups) == 4
    assert not any(made[0].weight is parameter for group in groups for parameter in group["params"])


def test_the_configs_rate_and_momenta_are_used():
    optimizer = build_optimizer(module(), TrainConfig(learning_rate=0.25, adam_betas=[0.8, 0.7]))
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(0.25, (0.8, 0.7))}
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("clip_norm, after", [(0.0, 10.0), (20.0, 10.0), (2.0, 2.0)])
def test_the_norm_is_that_before_clipping_and_zero_clips_nothing(clip_norm, after):
    made = nn.Linear(2, 1, bias=False)
    made.weight.grad = torch.tensor([[6.0, 8.0]])
    assert clip_gradients(made, clip_norm) == pytest.approx(10.0)
    assert made.weight.grad.norm().item() == pytest.approx(after, rel=1e-5)
    torch.testing.assert_close(made.weight.grad / after, torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=0)
