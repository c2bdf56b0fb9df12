"""Tiny random models of real transformers classes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []},
}


def tiny_model(family: str, *, seed: int = 0, **changes) -> nn.Module:
    """Return a random causal LM of a family, in float32 and eval mode; weights are spread so that caps and scales show."""
    torch.manual_seed(seed)
    fields = {**SMALL, **FAMILIES.get(family, {}), **changes}
    if family == "gpt2":
        fields = {name: value for name, value in fields.items() if not name.startswith(("hidden", "num_", "head_dim"))}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.eval()
