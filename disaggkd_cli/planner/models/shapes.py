"""The shape of a causal language model: what its `config.json` says about sizes, layer by layer, and nothing else.

Legend of the planner's formulas: h hidden size, q = heads * head_dim, kv = kv_heads * head_dim, f MLP width,
E experts, k experts per token, V vocabulary, S sequence length, T tokens of a micro-batch on one rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from disaggkd_cli.errors import UserError


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Softmax attention with grouped key/value heads (multi-head and multi-query are its special cases)."""

    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool = False
    qk_norm: bool = False
    input_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    sinks: bool = False
    softcap: bool = False

    @property
    def eager(self) -> bool:
        """Whether transformers computes it with [S, S] scores in memory: fused kernels know neither sinks nor soft
        caps."""
        return self.sinks or self.softcap

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2/V3): low-rank queries and a shared low-rank key/value."""

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def q(self) -> int:
        """Width of all queries (and of all keys once expanded)."""
        return self.heads * (self.nope_dim + self.rope_dim)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention with a gated delta rule and a short convolution (Qwen3-Next, Qwen3.5)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class DenseMLP:
    """A gated MLP: gate, up and down projections."""

    width: int
    bias: bool = False


@dataclass(frozen=True)
class ExpertMLP:
    """A mixture of gated expert MLPs, with optional shared experts that see every token."""

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer: `norms` RMSNorms of width h. `float32_norm`: the weight is applied in float32, before the
    cast back. `extra`: parameters that mixer, MLP and norms do not account for."""

    mixer: GroupedQueryAttention | LatentAttention | GatedDeltaNet
    mlp: DenseMLP | ExpertMLP
    norms: int = 2
    float32_norm: bool = False
    extra: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A causal LM: embedding, layers, final norm, head (`tied` heads share the embedding's weight).

    Attributes:
        outside: parameters of the backbone beside layers, token embedding and one RMSNorm.
        built: counted from the class on the meta device, layers as the nearest known kind.
    """

    name: str
    model_type: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerShape, ...]
    source: str = ""
    outside: int = 0
    built: bool = False

    def __hash__(self) -> int:
        """The hash, computed once: shapes with a hundred layers are keys of caches."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.hidden, self.vocabulary, self.tied, self.layers))

    def layer_kinds(self) -> dict[LayerShape, int]:
        """How many layers there are of each kind, in order of first appearance."""
        return self._kinds

    @cached_property
    def _kinds(self) -> dict[LayerShape, int]:
        return dict(Counter(self.layers))

    def with_layers(self, indices: list[int], name: str) -> ModelShape:
        """The same model with some of its layers only.

        Raises:
            UserError: when an index names no layer.
        """
        wrong = [index for index in indices if not 0 <= index < len(self.layers)]
        if wrong or not indices:
            raise UserError(
                f"student.from_teacher.layers names layers {wrong or indices}, but {self.name} has layers 0 "
                f"to {len(self.layers) - 1}"
            )
        return replace(self, name=name, layers=tuple(self.layers[index] for index in indices))
