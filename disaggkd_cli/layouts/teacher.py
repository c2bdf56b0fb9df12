"""What of a teacher's config.json decides how it may be laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class TeacherFacts:
    """What layouts depend on.

    Attributes:
        name: for messages.
        model_type: of the text part; it names the class.
        layers: decoder layers; 0 where the configuration does not say.
        heads: field -> number of heads, for every field that counts attention heads (several where layers differ).
        expert_width: width of one routed expert; 0 without experts.
        quantization: method of the checkpoint (`gptq`, `fp8`, …) where its weights stay quantised in memory.
        gguf: read from a GGUF file.
    """

    name: str
    model_type: str
    layers: int
    heads: tuple[tuple[str, int], ...] = ()
    expert_width: int = 0
    quantization: str | None = None
    gguf: bool = False


def facts_of(
    config: Mapping[str, Any], name: str, *, quantization: str | None = None, gguf: bool = False
) -> TeacherFacts:
    """Return the facts of a parsed config.json; a multimodal one gives those of its text part.

    Args:
        config: the fields, as `config.json` or transformers' `to_dict` gives them.
        name: of the model, for messages.
        quantization: the method, where weights are kept quantised.
        gguf: whether it is read from a GGUF file.
    """
    fields = config.get("text_config") or config
    experts = any(fields.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    width = fields.get("moe_intermediate_size") or fields.get("intermediate_size") or 0
    return TeacherFacts(
        name=name,
        model_type=str(fields.get("model_type") or config.get("model_type") or ""),
        layers=next((int(fields[key]) for key in _LAYER_COUNTS if fields.get(key)), 0),
        heads=tuple(_heads(fields)),
        expert_width=width if experts and isinstance(width, int) else 0,
        quantization=quantization,
        gguf=gguf,
    )


def _heads(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    found = []
    for key in sorted(fields):
        if key not in ("num_attention_heads", "n_head") and not key.endswith("key_value_heads"):
            continue
        value = fields[key]
        counts = value if isinstance(value, (list, tuple)) else [value]
        found += [(key, count) for count in sorted({count for count in counts if isinstance(count, int) and count})]
    return found
