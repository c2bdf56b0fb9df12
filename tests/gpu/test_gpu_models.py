"""Models of Qwen3.5's kind on a GPU: the split into backbone and head, and documents kept apart."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.models import backbone_of, head_of, requested_states, verify_split
from tests.support.models import tiny_model


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "qwen3_moe", "gemma2"])
def test_the_head_makes_the_models_own_logits(device, family):
    model = tiny_model(family).to(device)
    verify_split(model, head_of(model), family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_a_request_do_not_depend_on_where_it_is_computed(device, dtype):
    model = tiny_model("qwen3_5_text").to(dtype)
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    lengths, rows = torch.tensor([24, 24], dtype=torch.int32), torch.arange(0, 48, 3, dtype=torch.int32)
    here = requested_states(backbone_of(model), ids, lengths, rows, torch.device("cpu")).float()
    there = requested_states(backbone_of(model.to(device)), ids, lengths, rows, device).float().cpu()
    assert there.shape == (16, 32)
    assert torch.isfinite(there).all()
    tolerance = 1e-3 if dtype is torch.float32 else 5e-2
    assert (there - here).norm() / here.norm() < tolerance
