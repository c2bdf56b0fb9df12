"""The shape of a model of any class that transformers builds: parameters counted on the meta device, layers as the
nearest kind that the planner knows. The only way to a shape that imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.models.parameters import layer_parameters
from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    ExpertMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LayerShape,
    ModelShape,
)

if TYPE_CHECKING:
    from torch import nn

_QUERIES = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "q_a_proj", "q_b_proj", "query", "wqkv")
_NO_MLP = ("attn", "attention", "mixer", "mamba")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
_STATE = 128
"""Width of a recurrent layer's state for each channel, where its configuration does not say."""

logger = logging.getLogger("disaggkd")


def built_shape(config: Mapping[str, Any], name: str, source: str, key: str) -> ModelShape:
    """Return the shape of the causal LM that transformers builds from `config` (the parsed config.json).

    Counts are exact. A layer with attention is taken for grouped-query attention, any other mixer for a recurrence;
    what their formulas do not account for is the layer's `extra`. Activations are then good to some 25 %.

    Raises:
        UserError: transformers cannot build it, or it has no list of decoder layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from disaggkd_cli.models import backbone_of, decoder_layers

    fields = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype", "architectures")}
    model_type = fields.pop("model_type")
    logger.info("%s: %s is counted from its class on the meta device (imports torch)", key, model_type)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
        backbone, layers = backbone_of(model), decoder_layers(model)[1]
    except UserError as error:
        raise UserError(f"{key}: {source}: {error}") from None
    except Exception as error:  # configurations refuse their values in their own ways
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{key}: {source}: transformers cannot build this {model_type}: {why}") from None
    text = model.config.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # of layers that differ the first will do
    hidden, embedding = text.hidden_size, model.get_input_embeddings().weight
    shapes = tuple(_layer(layer, text, hidden) for layer in layers)
    output = model.get_output_embeddings()
    tied = output is None or output.weight is embedding
    counted = sum(layer_parameters(layer, hidden) for layer in shapes) + embedding.shape[0] * hidden + hidden
    return ModelShape(
        name=name,
        model_type=text.model_type,
        hidden=hidden,
        vocabulary=embedding.shape[0],
        tied=tied,
        layers=shapes,
        source=f"{source}; counted from {type(model).__name__} on the meta device, activations as of the nearest kinds "
        "of layers (±25 %)",
        outside=sum(one.numel() for one in backbone.parameters()) - counted,
        built=True,
    )


def _layer(module: nn.Module, text: Any, hidden: int) -> LayerShape:
    from torch import nn

    linear = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}
    attends = any(name.rpartition(".")[2] in _QUERIES for name in linear)
    experts = [
        (name, one)
        for name, one in module.named_parameters()
        if one.ndim == 3 and "expert" in name and one.shape[0] > 1
    ]
    mixer = _attention(text, hidden) if attends else _recurrence(text, hidden)
    nearest = LayerShape(mixer, _experts(experts, text, hidden) if experts else _dense(linear, hidden))
    total = sum(one.numel() for one in module.parameters())
    return LayerShape(nearest.mixer, nearest.mlp, extra=total - layer_parameters(nearest, hidden))


def _attention(text: Any, hidden: int) -> GroupedQueryAttention:
    heads = _first(getattr(text, "num_attention_heads", 1)) or 1
    groups = _first(getattr(text, "num_key_value_heads", None)) or heads
    size = _first(getattr(text, "head_dim", None)) or max(hidden // heads, 1)
    return GroupedQueryAttention(heads, min(groups, heads), size)


def _recurrence(text: Any, hidden: int) -> GatedDeltaNet:
    inner = next((int(getattr(text, name)) for name in ("mamba_d_ssm", "intermediate_size", "d_inner")
                  if isinstance(getattr(text, name, None), int)), 2 * hidden)  # fmt: skip
    state = next((getattr(text, name) for name in ("mamba_d_state", "ssm_state_size", "state_size")
                  if isinstance(getattr(text, name, None), int)), _STATE)  # fmt: skip
    return GatedDeltaNet(1, 1, state, inner, 4)


def _dense(linear: dict[str, nn.Linear], hidden: int) -> DenseMLP:
    """As wide as the widest matrix back to the hidden width that no attention is."""
    widths = [
        one.in_features
        for name, one in linear.items()
        if one.out_features == hidden and not any(part in name.lower() for part in _NO_MLP)
    ]
    return DenseMLP(max(widths, default=0))


def _experts(parameters: list, text: Any, hidden: int) -> ExpertMLP:
    count = parameters[0][1].shape[0]
    down = [one for name, one in parameters if "down" in name or "w2" in name] or [one for _, one in parameters]
    width = next((size for size in down[-1].shape[1:] if size != hidden), hidden)
    top_k = next((getattr(text, name) for name in _TOP_K if isinstance(getattr(text, name, None), int)), 1)
    return ExpertMLP(count, min(top_k, count), width)


def _first(value: Any) -> int | None:
    """Where layers differ a configuration gives one number for each."""
    if isinstance(value, (list, tuple)):
        return max((one for one in value if isinstance(one, int)), default=None)
    return value
