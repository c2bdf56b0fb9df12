"""Which parameters `student.freeze` leaves trainable: shell patterns over the names that transformers gives them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.parameters import count_parameters, layer_parameters, mixer_parameters, mlp_parameters
from disaggkd_cli.planner.shapes import DenseMLP, GatedDeltaNet, GroupedQueryAttention, LayerShape, ModelShape


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
