"""How many parameters low-rank adapters have: rank * (inputs + outputs) for each matrix that gets one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from disaggkd_cli.config.schema import LoraConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.parameters import layer_parameters
from disaggkd_cli.planner.shapes import (
    DenseMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    LayerShape,
    ModelShape,
)


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
