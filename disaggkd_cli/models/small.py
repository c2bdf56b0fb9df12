"""A small random model of the same class as a large one: what is proved on it holds for the class's own code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from disaggkd_cli.errors import UserError
from disaggkd_cli.models.layers import config_with_layers

_VOCABULARY = 128
_WIDTH_OF_MLPS = 64
_WINDOW = 16
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_GROUPS_OF_EXPERTS = ("n_group", "topk_group", "mamba_n_groups")
_RANKS = ("q_lora_rank", "kv_lora_rank", "o_lora_rank")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_SPREAD = 0.05
"""Standard deviation of the random matrices: large enough that every part of a layer shows in its output."""


def small_random_model(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a random causal LM of `model`'s class and kinds of layers, of a few narrow layers, in eval mode.

    Args:
        model: a transformers causal LM, which may have no weights (`meta`).

    Raises:
        UserError: the class cannot be built so small; the message says why.
    """
    try:
        config = _small_with_towers(model.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(model)._from_config(config, dtype=dtype)
            with torch.no_grad():
                for parameter in small.parameters():
                    if parameter.ndim >= 2:
                        parameter.normal_(std=_SPREAD)
    except Exception as error:  # a configuration of any class, changed by rules that may not suit it
        raise UserError(
            f"a small {type(model).__name__} could not be built ({type(error).__name__}: {error})"
        ) from None
    return small.to(device).eval()


def _small_with_towers(config: Any) -> Any:
    """A multimodal model's own configuration: its text part small, its other towers of one layer."""
    text = config.get_text_config()
    if text is config:
        return small_config(config)
    whole = copy.deepcopy(config)
    for name, part in list(vars(whole).items()):
        if name.endswith("_config") and hasattr(part, "model_type"):
            if part.to_dict() == text.to_dict():
                setattr(whole, name, small_config(text))
            elif hasattr(part, "num_hidden_layers"):
                part.num_hidden_layers = 1
    return whole


def small_config(config: Any) -> Any:
    """Return a copy of a text model's configuration with few, narrow layers; what a layer does stays as it is.

    Widths of heads stay, since rotary embeddings depend on them; the number of heads, experts and layers shrinks. Every
    kind of layer is kept, and at least four layers where there are so many.
    """
    count = config.num_hidden_layers
    small = config_with_layers(config, _layers_of_every_kind(config, count), count)
    _shrink_heads(small, config)
    for name, value in list(small.to_dict().items()):
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if "intermediate_size" in name or name in ("ffn_dim", "n_inner", "ffn_hidden_size"):
            setattr(small, name, _WIDTH_OF_MLPS)
        elif name.startswith("vocab_size"):
            setattr(small, name, _VOCABULARY)
        elif name in _IDS and value >= _VOCABULARY:
            setattr(small, name, 0)
        elif name in _EXPERTS:
            setattr(small, name, min(value, 8))
        elif name in _ACTIVE_EXPERTS:
            setattr(small, name, min(value, 2))
        elif name in _GROUPS_OF_EXPERTS and value:
            setattr(small, name, 1)
        elif name in _RANKS and value:
            setattr(small, name, min(value, 32))
        elif name in _WINDOWS and value:
            setattr(small, name, min(value, _WINDOW))
    for name in _IDS:
        if isinstance(getattr(small, name, None), list):
            setattr(small, name, 0)
    return small


def _layers_of_every_kind(config: Any, count: int) -> list[int]:
    kinds = zip(*(_per_layer(config, count).values()), strict=True) if _per_layer(config, count) else ()
    first: dict[Any, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    dense = getattr(config, "first_k_dense_replace", None) or 0
    kept = {*range(min(4, count)), *first.values(), *range(dense, min(dense + 2, count))}
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared:
        kept |= set(range(max(0, count - shared - 4), min(count, count - shared + 4)))
    return sorted(kept)


def _per_layer(config: Any, count: int) -> dict[str, list]:
    return {
        name: [str(one) for one in value]
        for name, value in config.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }


def _shrink_heads(small: Any, config: Any) -> None:
    heads = getattr(config, "num_attention_heads", None)
    width = config.hidden_size
    if isinstance(heads, int) and heads:
        each = getattr(config, "head_dim", None) or width // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        small_groups = min(groups, 2)
        small.num_attention_heads = small_groups * min(max(1, heads // groups), 2)
        if getattr(config, "num_key_value_heads", None):
            small.num_key_value_heads = small_groups
        width = small.num_attention_heads * each
        small.hidden_size = width
    keys = getattr(config, "linear_num_key_heads", None)
    if keys:
        small.linear_num_key_heads = min(keys, 2)
        small.linear_num_value_heads = small.linear_num_key_heads * (config.linear_num_value_heads // keys)
    each = getattr(config, "mamba_d_head", None)
    if each and getattr(config, "mamba_n_heads", None):
        inner = (getattr(config, "mamba_expand", None) or 2) * width
        small.mamba_n_heads = max(1, inner // each)
        if getattr(config, "mamba_d_ssm", None):
            small.mamba_d_ssm = small.mamba_n_heads * each
