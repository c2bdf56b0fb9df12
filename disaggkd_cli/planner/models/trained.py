"""Which parameters are trained: those that `student.freeze` leaves, or low-rank adapters.

Names are those that transformers gives parameters.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator

from disaggkd_cli.config.models import LoraConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.models.parameters import (
    count_parameters,
    layer_parameters,
    mixer_parameters,
    mlp_parameters,
)
from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    LayerShape,
    ModelShape,
)


def trained_share(shape: ModelShape, patterns: list[str]) -> tuple[float, bool]:
    """Return the trained share of the parameters, and whether the head is trained.

    Raises:
        UserError: when a pattern matches nothing.
    """
    total = count_parameters(shape).total
    if not patterns:
        return 1.0, True
    names = dict(parameter_names(shape))
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise UserError(
                f"student.freeze: {pattern!r} matches no parameter of {shape.name}, such as {next(iter(names))}"
            )
        frozen |= set(matched)
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return 1 - sum(names[name] for name in frozen) / total, head not in frozen


def parameter_names(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Names and sizes of the parameters, as transformers names those of dense attention models; other layers by their
    parts."""
    yield "model.embed_tokens.weight", shape.vocabulary * shape.hidden
    for index, layer in enumerate(shape.layers):
        for name, count in _layer_names(layer, shape.hidden):
            yield f"model.layers.{index}.{name}", count
    yield "model.norm.weight", shape.hidden
    if not shape.tied:
        yield "lm_head.weight", shape.vocabulary * shape.hidden


def _layer_names(layer: LayerShape, hidden: int) -> Iterator[tuple[str, int]]:
    mixer, mlp = layer.mixer, layer.mlp
    plain = isinstance(mixer, GroupedQueryAttention) and not (mixer.input_bias or mixer.output_bias or mixer.sinks)
    if plain and isinstance(mlp, DenseMLP) and not mlp.bias:
        gate = 2 if mixer.output_gate else 1
        parts = [
            ("self_attn.q_proj.weight", hidden * mixer.q * gate),
            ("self_attn.k_proj.weight", hidden * mixer.kv),
            ("self_attn.v_proj.weight", hidden * mixer.kv),
            ("self_attn.o_proj.weight", hidden * mixer.q),
        ]
        if mixer.qk_norm:
            parts += [("self_attn.q_norm.weight", mixer.head_dim), ("self_attn.k_norm.weight", mixer.head_dim)]
        parts += [(f"mlp.{name}_proj.weight", hidden * mlp.width) for name in ("gate", "up", "down")]
        named = sum(count for _, count in parts)
        yield from parts
        norms = layer_parameters(layer, hidden) - named
        yield "input_layernorm.weight", hidden
        yield "post_attention_layernorm.weight", norms - hidden
        return
    prefix = "linear_attn" if isinstance(mixer, GatedDeltaNet) else "self_attn"
    everything = layer_parameters(layer, hidden)
    mixed, multiplied = mixer_parameters(mixer, hidden), mlp_parameters(mlp, hidden)
    yield f"{prefix}.weight", mixed
    yield "mlp.weight", multiplied
    yield "input_layernorm.weight", everything - mixed - multiplied


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> tuple[int, int]:
    """Return the adapters' parameters in the whole model, and in its largest layer.

    Matrices of experts and routers are no `nn.Linear` in transformers 5 and get none.

    Raises:
        UserError: when no matrix has such a name.
    """
    total, largest = 0, 0
    biggest = max(layer_parameters(layer, shape.hidden) for layer in shape.layers)
    for index, layer in enumerate(shape.layers):
        count = sum(
            lora.rank * (inputs + outputs)
            for name, inputs, outputs in linear_layers(layer, shape.hidden)
            if _is_target(f"model.layers.{index}.{name}", lora.targets)
        )
        total += count
        if layer_parameters(layer, shape.hidden) == biggest:
            largest = max(largest, count)
    if not total:
        names = [name.rpartition(".")[2] for name, _, _ in linear_layers(shape.layers[0], shape.hidden)]
        raise UserError(f"student.lora.targets: {lora.targets} names no matrix of {shape.name}, such as {names[0]}")
    return total, largest


def linear_layers(layer: LayerShape, hidden: int) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of each `nn.Linear` in a decoder layer, the ends of names as in transformers."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, GroupedQueryAttention):
        yield "self_attn.q_proj", hidden, mixer.q * (2 if mixer.output_gate else 1)
        yield "self_attn.k_proj", hidden, mixer.kv
        yield "self_attn.v_proj", hidden, mixer.kv
        yield "self_attn.o_proj", mixer.q, hidden
    elif isinstance(mixer, LatentAttention):
        if mixer.query_rank:
            yield "self_attn.q_a_proj", hidden, mixer.query_rank
            yield "self_attn.q_b_proj", mixer.query_rank, mixer.q
        else:
            yield "self_attn.q_proj", hidden, mixer.q
        yield "self_attn.kv_a_proj_with_mqa", hidden, mixer.kv_rank + mixer.rope_dim
        yield "self_attn.kv_b_proj", mixer.kv_rank, mixer.heads * (mixer.nope_dim + mixer.value_dim)
        yield "self_attn.o_proj", mixer.heads * mixer.value_dim, hidden
    elif isinstance(mixer, GatedDeltaNet):
        yield "linear_attn.in_proj_qkv", hidden, 2 * mixer.keys + mixer.values
        yield "linear_attn.in_proj_z", hidden, mixer.values
        yield "linear_attn.in_proj_b", hidden, mixer.value_heads
        yield "linear_attn.in_proj_a", hidden, mixer.value_heads
        yield "linear_attn.out_proj", mixer.values, hidden
    width, prefix = (mlp.width, "mlp.") if isinstance(mlp, DenseMLP) else (mlp.shared_width, "mlp.shared.")
    if width:
        yield f"{prefix}gate_proj", hidden, width
        yield f"{prefix}up_proj", hidden, width
        yield f"{prefix}down_proj", width, hidden
    if not isinstance(mlp, DenseMLP) and mlp.shared_gate:
        yield "mlp.shared_expert_gate", hidden, 1


def _is_target(name: str, targets: str | list[str]) -> bool:
    """As peft decides: `all-linear`, a pattern of the whole name, or ends of names."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
