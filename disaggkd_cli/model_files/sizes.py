"""Are the sizes in a model's `config.json` possible at all, and those of the weights beside it? Asked before anything
is built from them, in seconds and without torch: whoever reads a model directory asks here first."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from disaggkd_cli.errors import UserError
from disaggkd_cli.model_files.headers import TensorEntry, tensor_entries
from disaggkd_cli.units import format_bytes

MOST_CONFIG_BYTES = 16 * 2**20
MOST_TOKENIZER_BYTES = 256 * 2**20
"""The largest tokenizer.json that is published has about 35 MB."""
_DEEPEST = 64

_WIDTHS = ("hidden_size", "n_embd", "d_model")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_SIZES: dict[str, int] = {
    **dict.fromkeys(_WIDTHS, 2**20),
    **dict.fromkeys(_DEPTHS, 4096),
    "vocab_size": 2**24,
}
"""Whole numbers that a language model cannot be without, and the most that is believed."""
_OPTIONAL: dict[str, int] = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "linear_num_key_heads"), 2**16),
    **dict.fromkeys(("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 2**16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2**20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 2**22),
    "n_inner": 2**22,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2**31),
}
"""Whole numbers above 0 where they are given; null stands for a default."""
_COUNTS: dict[str, int] = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"), 2**16
)
"""Whole numbers from 0 on, or null."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def read_model_config(path: Path, key: str) -> dict[str, Any]:
    """Return the fields of a `config.json` whose sizes are possible.

    Args:
        path: the file.
        key: the config key that named it, for messages.

    Raises:
        UserError: it is no such file, or a size in it is impossible; with the file, the field, its value and the mend.
    """
    try:
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise UserError(f"{key}: {path} has {format_bytes(path.stat().st_size)}, so it is no config.json")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UserError(f"{key}: {path} is nested too deeply for a config.json; download the model again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{key}: {path} holds no mapping, so it is no config.json")
    if _depth(fields) > _DEEPEST:
        raise UserError(f"{key}: {path} is nested more than {_DEEPEST} deep, so it is no config.json")
    for problem in _problems(fields):
        raise UserError(f"{key}: {path}: {problem}; take the config.json that belongs to the model's weights")
    return fields


def verify_model_directory(source: str, key: str, *, drawn: bool = False) -> None:
    """Refuse a local model whose sizes cannot be: of its config alone, beside its weights, or for this machine.

    A hub name, a GGUF file and whatever is no local path are let be: others answer for them.

    Args:
        source: a directory or a `config.json`.
        key: the config key that named it.
        drawn: fresh weights are drawn for it on this machine, in float32; files beside it are not looked at.

    Raises:
        UserError: naming the key, the file, the value and the mend.
    """
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.name != "config.json" or not file.is_file():
        return
    fields = read_model_config(file, key)
    tokenizer = file.with_name("tokenizer.json")
    if tokenizer.is_file() and tokenizer.stat().st_size > MOST_TOKENIZER_BYTES:
        raise UserError(
            f"{key}: {tokenizer} has {format_bytes(tokenizer.stat().st_size)}, and no tokenizer is that large (at most "
            f"{format_bytes(MOST_TOKENIZER_BYTES)} are read); download it again"
        )
    text = _text_part(fields)
    if drawn:
        needed, there = 4 * _fewest_parameters(text), _memory_bytes()
        if needed > there:
            raise UserError(
                f"{key}: {file} describes a model whose weights take at least {format_bytes(needed)} in float32, and "
                f"this machine has {format_bytes(there)} of memory; take a smaller model, or a larger machine"
            )
        return
    try:
        entries = tensor_entries(file.parent)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    for problem in _beside_weights(text, entries):
        raise UserError(f"{key}: {file}: {problem}; take the config.json that belongs to these weights")


def _problems(fields: dict[str, Any]) -> list[str]:
    parts = [("", fields)]
    parts += [(f"{name}.", fields[name]) for name in _TEXT_PARTS if name in fields]
    found = []
    for prefix, part in parts:
        if not isinstance(part, dict):
            found.append(f"{prefix.rstrip('.')} is {_shown(part)}; it must be a mapping")
            continue
        for name, value in part.items():
            problem = _problem_of(name, value)
            if problem:
                found.append(prefix + problem)
    return found or _together(_text_part(fields))


def _problem_of(name: str, value: Any) -> str | None:
    if name in _SIZES:
        return _whole(name, value, 1, _SIZES[name])
    if value is None:
        return None
    if name in _OPTIONAL:
        # Families whose layers differ give one number a layer.
        values = value if isinstance(value, list) else [value]
        return next((found for one in values if (found := _whole(name, one, 1, _OPTIONAL[name]))), None)
    return _whole(name, value, 0, _COUNTS[name]) if name in _COUNTS else None


def _whole(name: str, value: Any, least: int, most: int) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return None
    return f"{name} is {_shown(value)}; it must be a whole number from {least} to {most:,}"


def _together(text: dict[str, Any]) -> list[str]:
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        return [f"num_key_value_heads is {shared}, which does not divide num_attention_heads={heads}"]
    chosen, experts = text.get("num_experts_per_tok"), _experts(text)
    if chosen and experts > 1 and chosen > experts:
        return [f"num_experts_per_tok is {chosen}, and there are {experts} experts"]
    return []


def _beside_weights(text: dict[str, Any], entries: dict[str, TensorEntry]) -> list[str]:
    """Compare depth, width and vocabulary with the headers of the weights; the loader compares every tensor."""
    if not entries:
        return []
    found = []
    layers, depth = _first(text, _DEPTHS), _held_layers(entries)
    if layers is not None and depth and layers > depth:
        found.append(f"{_name(text, _DEPTHS)} is {layers:,}, but the weights beside it are of {depth} layers")
    width, vocabulary = _first(text, _WIDTHS), text.get("vocab_size")
    embeddings = [(name, one.shape) for name, one in entries.items() if _EMBEDDING.search(name) and len(one.shape) == 2]
    if len(embeddings) == 1 and width is not None and vocabulary is not None:
        name, shape = embeddings[0]
        plain = entries[name].dtype in ("F64", "F32", "F16", "BF16")  # quantised ones are packed
        if plain and shape[0] != vocabulary:
            found.append(f"vocab_size is {vocabulary:,}, but {name} beside it is of {shape[0]:,} ids")
        # Some families embed into fewer columns than they compute with.
        narrower = any(text.get(one) == shape[1] for one in ("word_embed_proj_dim", "embedding_size"))
        if plain and shape[1] != width and not narrower:
            found.append(f"{_name(text, _WIDTHS)} is {width:,}, but {name} beside it is {shape[1]:,} wide")
    return found


def _held_layers(entries: dict[str, TensorEntry]) -> int:
    """Return how many layers the longest stack of layers has."""
    return max((int(match.group(1)) + 1 for name in entries if (match := _LAYER.search(name))), default=0)


def _fewest_parameters(text: dict[str, Any]) -> int:
    """Return a number of parameters that no model of these sizes is below: embedding, and two matrices a layer."""
    width, layers = _first(text, _WIDTHS) or 0, _first(text, _DEPTHS) or 0
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or text.get("n_inner") or width
    inner = inner if isinstance(inner, int) else min(inner)
    # Where layers without experts stand between the others, experts are not counted.
    every = not any(text.get(name) for name in ("first_k_dense_replace", "mlp_only_layers", "moe_layer_freq"))
    every &= text.get("decoder_sparse_step") in (None, 1) and text.get("interleave_moe_layer_step") in (None, 1)
    return (text.get("vocab_size") or 0) * width + layers * 2 * width * inner * (_experts(text) if every else 1)


def _experts(text: dict[str, Any]) -> int:
    """Return the experts of a layer, 1 where there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((text[name] for name in names if text.get(name)), 1)


def _text_part(fields: dict[str, Any]) -> dict[str, Any]:
    return next((fields[name] for name in _TEXT_PARTS if isinstance(fields.get(name), dict)), fields)


def _first(text: dict[str, Any], names: tuple[str, ...]) -> int | None:
    name = _name(text, names)
    return None if name is None else text[name]


def _name(text: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in text), None)


def _depth(value: Any) -> int:
    """Return how deep mappings and lists are nested, without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting and deepest <= _DEEPEST:
        one, depth = waiting.pop()
        deepest = max(deepest, depth)
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        waiting += [(inner, depth + 1) for inner in inside if isinstance(inner, (dict, list))]
    return deepest


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value)
    except ValueError:  # a number of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
