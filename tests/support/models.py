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


_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip

MORE_FAMILIES: dict[str, dict] = {
    "cohere2": {"logit_scale": 0.25, "sliding_window": 16, "layer_types": _ALTERNATING},
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
    "falcon_h1": {
        "lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 16,
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 16, "layer_types": _ALTERNATING},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {**_LOCAL_EXPERTS, "sliding_window": 16, "layer_types": _ALTERNATING},
    "granitemoe": {"logits_scaling": 4.0, **_LOCAL_EXPERTS},
    "granitemoehybrid": {
        "logits_scaling": 4.0, **_LOCAL_EXPERTS, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1, "shared_intermediate_size": 32,
    },
    "hyperclovax": {"logits_scaling": 0.5},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "minicpm3": {**_LATENT, "dim_model_base": 16},
    "mixtral": _LOCAL_EXPERTS,
    "nanochat": {},
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {**_LOCAL_EXPERTS, "sliding_window": None, "lm_head_bias": True},
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "smollm3": {},
}  # fmt: skip
"""Families beside FAMILIES; some of them carry state across documents."""

ALL_FAMILIES = {**FAMILIES, **MORE_FAMILIES}


def tiny_model(family: str, *, seed: int = 0, **changes) -> nn.Module:
    """Return a random causal LM of a family, float32, in eval mode; weights are spread so that caps and scales show."""
    torch.manual_seed(seed)
    fields = {**SMALL, **ALL_FAMILIES.get(family, {}), **changes}
    if family == "gpt2":
        fields = {name: value for name, value in fields.items() if not name.startswith(("hidden", "num_", "head_dim"))}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.eval()
