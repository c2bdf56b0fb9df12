"""What a layer keeps of a sequence, as the planner counts it and as transformers' caches have it."""

import inspect
import json

import pytest
import torch
from transformers import DynamicCache

from disaggkd_cli.planner.memory.writing import kept_by_layer
from disaggkd_cli.planner.models import resolve_model
from tests.support.models import tiny_model

LENGTH = 23


def tensors_of(layer) -> list[torch.Tensor]:
    """All tensors that a layer of a cache holds."""
    found = []
    for value in vars(layer).values():
        values = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        found += [one for one in values if isinstance(one, torch.Tensor)]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_it_is_what_transformers_keeps(family, tmp_path):
    model = tiny_model(family)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    shape = resolve_model(str(tmp_path), "student.model")
    cache = DynamicCache(config=model.config.get_text_config())
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        for step in range(LENGTH):
            model(input_ids=torch.full((1, 1), 9 + step), use_cache=True, **{named: cache})
    for planned, kept in zip(shape.layers, cache.layers, strict=True):
        held = sum(one.numel() * one.element_size() for one in tensors_of(kept))
        counted = kept_by_layer(planned, LENGTH, 4)
        # Between tokens a sliding window lacks one, and counts those that it has seen.
        a_token = counted / 16 - 8 if getattr(planned.mixer, "window", None) else 0
        assert held == counted - a_token
