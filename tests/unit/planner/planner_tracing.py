"""Bytes that autograd saves in a backbone's forward, by unique storage, on fake tensors."""

from __future__ import annotations

import torch
import transformers.masking_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from disaggkd_cli.planner.models import load_preset


def saved_by_autograd(preset: str, layers: int, tokens: int, attention: str = "auto") -> int:
    """Bytes saved by `layers` layers for one bfloat16 sequence of `tokens`, weights apart."""
    fields = dict(load_preset(preset)["config"]) | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    packed = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
            if any(hasattr(module, "gate_up_proj") for module in model.modules()):
                model.set_experts_implementation("grouped_mm")
            if attention != "auto":
                model.set_attn_implementation(attention)
            weights = {one.untyped_storage()._cdata for one in model.parameters()}
            kept = {}

            def keep(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    kept[storage._cdata] = (storage.nbytes(), tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model.model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
            return sum(size for size, _ in kept.values())
    finally:
        transformers.masking_utils.find_packed_sequence_indices = packed


def forward_peak(preset: str, attention: str, tokens: int, *, packed: bool, layers: int = 2) -> float:
    """Peak bytes of a backbone's forward without gradients for one bfloat16 sequence, weights apart."""
    fields = dict(load_preset(preset)["config"]) | {"num_hidden_layers": layers}
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:layers]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    find = transformers.masking_utils.find_packed_sequence_indices
    if not packed:
        transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with FakeTensorMode():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            if any(hasattr(module, "gate_up_proj") for module in model.modules()):
                model.set_experts_implementation("grouped_mm")
            if attention != "auto":
                model.set_attn_implementation(attention)
            ids, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
            tracker = MemTracker()
            tracker.track_external(model.model)
            with tracker, torch.no_grad():
                model.model(input_ids=ids, position_ids=positions, use_cache=False)
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
            return peak - sum(one.numel() * one.element_size() for one in model.model.parameters())
    finally:
        transformers.masking_utils.find_packed_sequence_indices = find
