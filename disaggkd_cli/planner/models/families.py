"""From the fields of a Hugging Face `config.json` to a `ModelShape`. An architecture that is not known is refused,
never guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    ExpertMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    LayerShape,
    ModelShape,
)

Fields = dict[str, Any]
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DELTA = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK_EXPERTS = (
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
)
_QWEN_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def model_shape(config: Fields, name: str, source: str) -> ModelShape:
    """Return the shape that `config` (the parsed config.json) describes; a multimodal config gives its text tower.

    Raises:
        UserError: when the architecture is unknown, or fields that its shape needs are missing.
    """
    fields = dict(config.get("text_config") or config)
    # transformers writes the same number under either name, depending on its version and the family.
    for name_of_count, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if name_of_count not in fields and other in fields:
            fields[name_of_count] = fields[other]
    model_type = text_model_type(config)
    family = _FAMILIES.get(model_type.removesuffix("_text"))
    if family is None:
        required = (*_SIZES, *_HEADS, "head_dim", "intermediate_size")
        missing = [key for key in required if key not in fields]
        raise UserError(
            f"{source}: model_type {model_type!r} is not an architecture that the planner knows "
            f"({', '.join(sorted(_FAMILIES))})"
            + (f"; its config.json also lacks {', '.join(missing)}" if missing else "")
            + ". Give a config.json of a known architecture; the planner does not guess shapes"
        )
    required_keys, build, tied_by_default = family
    missing = [key for key in (*_SIZES, *required_keys) if key not in fields]
    if missing:
        raise UserError(f"{source}: a {model_type} config.json must give {', '.join(missing)}")
    tied = config.get("tie_word_embeddings", fields.get("tie_word_embeddings", tied_by_default))
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden=fields["hidden_size"],
        vocabulary=fields["vocab_size"],
        tied=bool(tied),
        layers=tuple(build(fields, index) for index in range(fields["num_hidden_layers"])),
        source=source,
    )


def text_model_type(config: Fields) -> str:
    """The model_type of a parsed config.json's text part."""
    fields = config.get("text_config") or config
    return str(fields.get("model_type") or config.get("model_type") or "")


def is_known(model_type: str) -> bool:
    """Whether the planner has formulas of its own for this kind of model."""
    return model_type.removesuffix("_text") in _FAMILIES


def _layer_type(fields: Fields, index: int, default: str) -> str:
    kinds = fields.get("layer_types")
    return kinds[index] if kinds else default


def _attention(fields: Fields, **more: Any) -> GroupedQueryAttention:
    heads = fields["num_attention_heads"]
    return GroupedQueryAttention(
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        **more,
    )


def _llama(fields: Fields, index: int) -> LayerShape:
    bias = bool(fields.get("attention_bias", False))
    window = fields.get("sliding_window") if fields.get("model_type") == "mistral" else None
    attention = _attention(fields, input_bias=bias, output_bias=bias, window=window)
    return LayerShape(attention, DenseMLP(fields["intermediate_size"], bias=bool(fields.get("mlp_bias", False))))


def _qwen2(fields: Fields, index: int) -> LayerShape:
    return LayerShape(_attention(fields, input_bias=True), DenseMLP(fields["intermediate_size"]))


def _qwen3(fields: Fields, index: int) -> LayerShape:
    bias = bool(fields.get("attention_bias", False))
    attention = _attention(fields, qk_norm=True, input_bias=bias, output_bias=bias)
    return LayerShape(attention, DenseMLP(fields["intermediate_size"]))


def _qwen3_moe(fields: Fields, index: int) -> LayerShape:
    layer = _qwen3(fields, index)
    if index in (fields.get("mlp_only_layers") or []) or (index + 1) % (fields.get("decoder_sparse_step") or 1):
        return layer
    experts = ExpertMLP(fields["num_experts"], fields["num_experts_per_tok"], fields["moe_intermediate_size"])
    return LayerShape(layer.mixer, experts)


def _qwen_hybrid_mixer(fields: Fields, index: int) -> GroupedQueryAttention | GatedDeltaNet:
    interval = fields.get("full_attention_interval") or 4
    default = "linear_attention" if (index + 1) % interval else "full_attention"
    if _layer_type(fields, index, default) == "full_attention":
        bias = bool(fields.get("attention_bias", False))
        return _attention(fields, qk_norm=True, output_gate=True, input_bias=bias, output_bias=bias)
    return GatedDeltaNet(
        key_heads=fields["linear_num_key_heads"],
        value_heads=fields["linear_num_value_heads"],
        key_dim=fields["linear_key_head_dim"],
        value_dim=fields["linear_value_head_dim"],
        kernel=fields["linear_conv_kernel_dim"],
    )


def _qwen3_5(fields: Fields, index: int) -> LayerShape:
    return LayerShape(_qwen_hybrid_mixer(fields, index), DenseMLP(fields["intermediate_size"]), float32_norm=True)


def _qwen3_5_moe(fields: Fields, index: int) -> LayerShape:
    experts = ExpertMLP(
        fields["num_experts"],
        fields["num_experts_per_tok"],
        fields["moe_intermediate_size"],
        shared_width=fields["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return LayerShape(_qwen_hybrid_mixer(fields, index), experts, float32_norm=True)


def _mixtral(fields: Fields, index: int) -> LayerShape:
    experts = ExpertMLP(fields["num_local_experts"], fields["num_experts_per_tok"], fields["intermediate_size"])
    return LayerShape(_attention(fields, window=fields.get("sliding_window")), experts)


def _gemma(fields: Fields, index: int) -> LayerShape:
    return LayerShape(_attention(fields), DenseMLP(fields["intermediate_size"]), float32_norm=True)


def _gemma2(fields: Fields, index: int) -> LayerShape:
    sliding = _layer_type(fields, index, "full_attention" if index % 2 else "sliding_attention") == "sliding_attention"
    softcap = bool(fields.get("attn_logit_softcapping", 50.0))
    attention = _attention(fields, window=fields["sliding_window"] if sliding else None, softcap=softcap)
    return LayerShape(attention, DenseMLP(fields["intermediate_size"]), norms=4, float32_norm=True)


def _gemma3(fields: Fields, index: int) -> LayerShape:
    pattern = fields.get("sliding_window_pattern") or 6
    sliding = _layer_type(fields, index, "sliding_attention" if (index + 1) % pattern else "full_attention")
    window = fields["sliding_window"] if sliding == "sliding_attention" else None
    attention = _attention(fields, qk_norm=True, window=window)
    return LayerShape(attention, DenseMLP(fields["intermediate_size"]), norms=4, float32_norm=True)


def _deepseek_v3(fields: Fields, index: int) -> LayerShape:
    attention = LatentAttention(
        heads=fields["num_attention_heads"],
        query_rank=fields["q_lora_rank"],
        kv_rank=fields["kv_lora_rank"],
        nope_dim=fields["qk_nope_head_dim"],
        rope_dim=fields["qk_rope_head_dim"],
        value_dim=fields["v_head_dim"],
    )
    return LayerShape(attention, _deepseek_mlp(fields, index))


def _deepseek_mlp(fields: Fields, index: int) -> DenseMLP | ExpertMLP:
    if index < fields["first_k_dense_replace"]:
        return DenseMLP(fields["intermediate_size"])
    width = fields["moe_intermediate_size"]
    shared = fields["n_shared_experts"] * width
    return ExpertMLP(fields["n_routed_experts"], fields["num_experts_per_tok"], width, shared_width=shared)


def _gpt_oss(fields: Fields, index: int) -> LayerShape:
    sliding = _layer_type(fields, index, "full_attention" if index % 2 else "sliding_attention") == "sliding_attention"
    window = fields["sliding_window"] if sliding else None
    attention = _attention(fields, input_bias=True, output_bias=True, sinks=True, window=window)
    experts = ExpertMLP(
        fields["num_local_experts"], fields["num_experts_per_tok"], fields["intermediate_size"], bias=True
    )
    return LayerShape(attention, experts, float32_norm=True)


def _granite(fields: Fields, index: int) -> LayerShape:
    bias = bool(fields.get("attention_bias", False))
    attention = _attention(fields, input_bias=bias, output_bias=bias)
    return LayerShape(attention, DenseMLP(fields["intermediate_size"], bias=bool(fields.get("mlp_bias", False))))


def _phi3(fields: Fields, index: int) -> LayerShape:
    return LayerShape(_attention(fields, window=fields.get("sliding_window")), DenseMLP(fields["intermediate_size"]))


def _olmo2(fields: Fields, index: int) -> LayerShape:
    """Queries and keys are normalised over all heads at once."""
    attention = _attention(fields, qk_norm=True)
    wider = attention.q + attention.kv - 2 * attention.head_dim
    return LayerShape(attention, DenseMLP(fields["intermediate_size"]), extra=wider)


def _glm4_moe(fields: Fields, index: int) -> LayerShape:
    attention = _attention(
        fields, input_bias=bool(fields.get("attention_bias")), qk_norm=bool(fields.get("use_qk_norm"))
    )
    return LayerShape(attention, _deepseek_mlp(fields, index))


def _qwen3_next(fields: Fields, index: int) -> LayerShape:
    mixer = _qwen_hybrid_mixer(fields, index)
    sparse = (index + 1) % (fields.get("decoder_sparse_step") or 1) == 0
    if index in (fields.get("mlp_only_layers") or []) or not sparse:
        return LayerShape(mixer, DenseMLP(fields["intermediate_size"]), float32_norm=True)
    return LayerShape(mixer, _qwen3_5_moe(fields, index).mlp, float32_norm=True)


def _llama4(fields: Fields, index: int) -> LayerShape:
    step = fields.get("interleave_moe_layer_step") or 1
    layers = fields.get("moe_layers")
    sparse = index in layers if layers is not None else (index + 1) % step == 0
    mlp: DenseMLP | ExpertMLP = DenseMLP(fields["intermediate_size_mlp"])
    if sparse:
        width = fields["intermediate_size"]
        mlp = ExpertMLP(fields["num_local_experts"], fields["num_experts_per_tok"], width, shared_width=width)
    return LayerShape(_attention(fields), mlp)


_FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[Fields, int], LayerShape], bool]] = {
    "llama": (("num_attention_heads", "intermediate_size"), _llama, False),
    "mistral": ((*_HEADS, "intermediate_size"), _llama, False),
    "qwen2": ((*_HEADS, "intermediate_size"), _qwen2, False),
    "qwen3": ((*_HEADS, "head_dim", "intermediate_size"), _qwen3, False),
    "qwen3_moe": ((*_HEADS, "head_dim", "intermediate_size", *_QWEN_EXPERTS), _qwen3_moe, False),
    "qwen3_5": ((*_HEADS, "head_dim", "intermediate_size", *_DELTA), _qwen3_5, False),
    "qwen3_5_moe": (
        (*_HEADS, "head_dim", *_QWEN_EXPERTS, "shared_expert_intermediate_size", *_DELTA), _qwen3_5_moe, False,
    ),
    "mixtral": ((*_HEADS, "intermediate_size", "num_local_experts", "num_experts_per_tok"), _mixtral, False),
    "gemma": ((*_HEADS, "head_dim", "intermediate_size"), _gemma, True),
    "gemma2": ((*_HEADS, "head_dim", "intermediate_size", "sliding_window"), _gemma2, True),
    "gemma3": ((*_HEADS, "head_dim", "intermediate_size", "sliding_window"), _gemma3, True),
    "deepseek_v3": (
        ("num_attention_heads", *_LATENT, "intermediate_size", "moe_intermediate_size", "n_routed_experts",
         "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace"), _deepseek_v3, False,
    ),
    "deepseek_v2": (
        ("num_attention_heads", *_LATENT, "intermediate_size", *_DEEPSEEK_EXPERTS), _deepseek_v3, False,
    ),
    "kimi_k2": (
        ("num_attention_heads", *_LATENT, "intermediate_size", *_DEEPSEEK_EXPERTS), _deepseek_v3, False,
    ),
    "granite": ((*_HEADS, "intermediate_size"), _granite, False),
    "smollm3": ((*_HEADS, "intermediate_size"), _granite, True),
    "phi3": ((*_HEADS, "intermediate_size"), _phi3, False),
    "olmo2": ((*_HEADS, "intermediate_size"), _olmo2, False),
    "glm4_moe": ((*_HEADS, "head_dim", "intermediate_size", *_DEEPSEEK_EXPERTS), _glm4_moe, False),
    "qwen3_next": (
        (*_HEADS, "head_dim", *_QWEN_EXPERTS, "shared_expert_intermediate_size", *_DELTA), _qwen3_next, False,
    ),
    "llama4": (
        (*_HEADS, "head_dim", "intermediate_size", "intermediate_size_mlp", "num_local_experts",
         "num_experts_per_tok"), _llama4, False,
    ),
    "gpt_oss": (
        (*_HEADS, "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok", "sliding_window"),
        _gpt_oss, False,
    ),
}  # fmt: skip
"""model_type (without a `_text` suffix) -> fields it must give, layer builder, whether heads are tied when unsaid."""
