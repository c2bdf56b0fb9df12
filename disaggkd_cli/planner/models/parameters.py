"""Exact parameter counts from shapes. Checked against transformers' own modules, to the last parameter, for every
preset."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    ExpertMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    LayerShape,
    ModelShape,
)


@dataclass(frozen=True)
class Parameters:
    """Counts of one model. `head` is zero when the head is tied; `active` counts what one token touches."""

    total: int
    active: int
    embedding: int
    head: int
    final_norm: int
    largest_layer: int

    @property
    def backbone(self) -> int:
        """Everything but an untied head: what a teacher replica holds, since it sends hidden states."""
        return self.total - self.head

    @property
    def root(self) -> int:
        """What FSDP's root unit holds when each layer is a unit of its own: embedding, final norm and head."""
        return self.embedding + self.head + self.final_norm

    @property
    def layers(self) -> int:
        return self.total - self.embedding - self.head - self.final_norm

    @property
    def active_layers(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return self.active - self.embedding - self.head - self.final_norm


def mixer_parameters(mixer: GroupedQueryAttention | LatentAttention | GatedDeltaNet, hidden: int) -> int:
    """Parameters of the token mixer of one layer."""
    if isinstance(mixer, GroupedQueryAttention):
        gate = 2 if mixer.output_gate else 1
        count = hidden * mixer.q * gate + 2 * hidden * mixer.kv + mixer.q * hidden
        count += 2 * mixer.head_dim if mixer.qk_norm else 0
        count += mixer.q * gate + 2 * mixer.kv if mixer.input_bias else 0
        count += hidden if mixer.output_bias else 0
        return count + (mixer.heads if mixer.sinks else 0)
    if isinstance(mixer, LatentAttention):
        if mixer.query_rank:
            queries = hidden * mixer.query_rank + mixer.query_rank + mixer.query_rank * mixer.q
        else:
            queries = hidden * mixer.q
        down = hidden * (mixer.kv_rank + mixer.rope_dim) + mixer.kv_rank
        up = mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.value_dim)
        return queries + down + up + mixer.heads * mixer.value_dim * hidden
    projected = 2 * mixer.keys + mixer.values
    projections = hidden * (projected + mixer.values + 2 * mixer.value_heads)
    state = 2 * mixer.value_heads + mixer.value_dim
    return projections + projected * mixer.kernel + state + mixer.values * hidden


def mlp_parameters(mlp: DenseMLP | ExpertMLP, hidden: int, active: bool = False) -> int:
    """Parameters of the MLP of one layer: all of them, or those that one token uses."""
    if isinstance(mlp, DenseMLP):
        return 3 * hidden * mlp.width + (2 * mlp.width + hidden if mlp.bias else 0)
    one_expert = 3 * hidden * mlp.width + (2 * mlp.width + hidden if mlp.bias else 0)
    router = hidden * mlp.experts + (mlp.experts if mlp.bias else 0)
    shared = 3 * hidden * mlp.shared_width + (hidden if mlp.shared_gate else 0)
    return router + shared + one_expert * (mlp.top_k if active else mlp.experts)


def layer_parameters(layer: LayerShape, hidden: int, active: bool = False) -> int:
    """Parameters of one decoder layer."""
    norms = layer.norms * hidden
    return mixer_parameters(layer.mixer, hidden) + mlp_parameters(layer.mlp, hidden, active) + norms + layer.extra


def count_parameters(shape: ModelShape) -> Parameters:
    """Count `shape`'s parameters. Vision towers and multi-token-prediction heads are not part of it."""
    kinds = shape.layer_kinds()
    table = shape.vocabulary * shape.hidden
    embedding, head = table + shape.outside, 0 if shape.tied else table
    outside = embedding + head + shape.hidden
    return Parameters(
        total=outside + sum(layer_parameters(layer, shape.hidden) * count for layer, count in kinds.items()),
        active=outside + sum(layer_parameters(layer, shape.hidden, True) * count for layer, count in kinds.items()),
        embedding=embedding,
        head=head,
        final_norm=shape.hidden,
        largest_layer=max(layer_parameters(layer, shape.hidden) for layer in kinds),
    )
