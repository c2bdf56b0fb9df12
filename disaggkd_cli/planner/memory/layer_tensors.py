"""Tensors that autograd saves in one decoder layer, in bytes per token; and what a forward without gradients needs.

The formulas list what transformers' modules save in eager mode: b bytes an element in the compute dtype, 4 in float32.
The first term of every layer is its RMSNorms; the input of a projection is the output of the norm before it and is
counted there.
"""

from __future__ import annotations

from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    ExpertMLP,
    GroupedQueryAttention,
    LatentAttention,
    LayerShape,
)
from disaggkd_cli.planner.terms import Term, term

_EAGER = (
    "counted from transformers' eager modules (facts: 217,224 B for a Llama-3.1-8B layer, 231,720 B for "
    "Qwen3-8B, traced "
    "with MemTracker, torch 2.13)"
)
_DELTA_FLA = "derived from the tensors that fla's chunk kernel keeps; not traced (needs a GPU)"
_DELTA_TORCH = "counted from transformers' torch_chunk_gated_delta_rule; checked by `plan --verify`"
_MOE = "counted from transformers' grouped_mm experts; routing assumed balanced"
DELTA_CHUNK = 64


def saved_per_token(
    layer: LayerShape,
    hidden: int,
    compute_bytes: int,
    sequence: int,
    *,
    packed: bool = False,
    delta_kernel: str = "fla",
) -> list[Term]:
    """Return what one layer keeps for backward, bytes per token.

    Args:
        layer: the layer.
        hidden: h.
        compute_bytes: b, 2 for bfloat16 and 4 for float32.
        sequence: S.
        packed: rows hold several documents, so attention gets a mask. With a mask (also: a window shorter than S)
            PyTorch's attention keeps a [S, S] mask in the compute dtype for every layer, and repeats keys and values
            per query head.
        delta_kernel: `fla` (GPU kernels) or `torch` (transformers' own code, on CPUs).
    """
    return [
        _norms(layer, hidden, compute_bytes),
        _mixer(layer, compute_bytes, sequence, packed, delta_kernel),
        _mlp(layer.mlp, hidden, compute_bytes),
    ]


def _norms(layer: LayerShape, hidden: int, b: int) -> Term:
    after = 2 if layer.norms == 4 else 0
    values = {"h": hidden, "b": b, "before": layer.norms - after, "after": after}
    if layer.float32_norm:
        return term("norms", "before * ((8 + b) * h + 4) + after * (8 * h + 4)", _EAGER, **values)
    return term("norms", "before * ((4 + 2 * b) * h + 4) + after * ((4 + b) * h + 4)", _EAGER, **values)


def _mixer(layer: LayerShape, b: int, sequence: int, packed: bool, delta_kernel: str) -> Term:
    mixer = layer.mixer
    if isinstance(mixer, GroupedQueryAttention):
        formula = _attention_formula(mixer, sequence, packed)
        if mixer.qk_norm:
            formula += " + 8 * (q + kv) + 4 * (a + g)" if layer.float32_norm else " + (4 + b) * (q + kv) + 4 * (a + g)"
        if mixer.output_gate:
            formula += " + (3 + b // 4) * b * q"
        values = {"b": b, "q": mixer.q, "kv": mixer.kv, "a": mixer.heads, "g": mixer.kv_heads, "S": sequence}
        return term("attention", formula, _EAGER, **values)
    if isinstance(mixer, LatentAttention):
        values = {"b": b, "q": mixer.q, "r_q": mixer.query_rank or 0, "r": mixer.kv_rank, "a": mixer.heads}
        values |= {"d_n": mixer.nope_dim, "d_v": mixer.value_dim}
        values["S"] = sequence if packed else 0
        formula = "(4 + 2 * b) * (r_q + r) + 2 * b * q + b * a * (d_n + d_v) + b * a * d_v + 4 * a + b * S"
        return term("latent attention", formula, _EAGER, **values)
    values = {"b": b, "K": mixer.keys, "Vd": mixer.values, "n": mixer.value_heads}
    if delta_kernel == "fla":
        formula = "2 * b * (2 * K + Vd) + 3 * b * Vd + (8 + 64 * b) * n"
        return term("gated delta net", formula, _DELTA_FLA, **values)
    values |= {"Ke": mixer.value_heads * mixer.key_dim, "C": DELTA_CHUNK, "d_k": mixer.key_dim, "d_v": mixer.value_dim}
    formula = (
        "2 * b * (2 * K + Vd) + (32 + 16 * (b // 4)) * Ke + (24 + 3 * b) * Vd + 20 * C * n + 4 * n * d_k * d_v / "
        "C + 40 * n"
    )
    return term("gated delta net (torch)", formula, _DELTA_TORCH, **values)


def _attention_formula(mixer: GroupedQueryAttention, sequence: int, packed: bool) -> str:
    if mixer.eager:
        return "b * 4 * q + 8 * a * S" if mixer.softcap else "b * 4 * q + b * a * (S + 1) + 8 * a"
    masked = packed or (mixer.window is not None and sequence >= mixer.window)
    return "b * (4 * q + S) + 4 * a" if masked else "b * (2 * q + 2 * kv) + 4 * a"


def _mlp(mlp: DenseMLP | ExpertMLP, hidden: int, b: int) -> Term:
    if isinstance(mlp, DenseMLP):
        return term("MLP", "4 * b * f", _EAGER, b=b, f=mlp.width)
    formula = "k * b * (2 * h + c * f_e) + 4 * E + 24 * k"
    values = {"k": mlp.top_k, "b": b, "h": hidden, "f_e": mlp.width, "E": mlp.experts, "c": 7 if mlp.bias else 4}
    if mlp.shared_width:
        formula += " + 4 * b * f_s" + (" + b * h" if mlp.shared_gate else "")
        values["f_s"] = mlp.shared_width
    return term("experts", formula, _MOE, **values)


def checkpointed_per_token(hidden: int, compute_bytes: int) -> Term:
    """What full activation checkpointing keeps of one layer: its input."""
    return term("layer input", "b * h", "the checkpointed tensor itself", b=compute_bytes, h=hidden)


def forward_working_set(layer: LayerShape, hidden: int, b: int) -> Term:
    """Bytes per token alive at the fullest moment of one layer's forward without gradients (a teacher's prefill)."""
    source = "largest set of tensors alive at once in transformers' eager forward; derived"
    mixer = layer.mixer
    if isinstance(mixer, GroupedQueryAttention):
        gate = mixer.q if mixer.output_gate else 0
        attention = (2 * hidden + 3 * mixer.q + 3 * mixer.kv + gate) * b
    elif isinstance(mixer, LatentAttention):
        attention = (2 * hidden + 4 * mixer.q + mixer.heads * (mixer.nope_dim + mixer.value_dim)) * b
    else:
        attention = (2 * hidden + 2 * (2 * mixer.keys + mixer.values) + 3 * mixer.values) * b
    mlp = layer.mlp
    if isinstance(mlp, DenseMLP):
        return term(
            "teacher forward",
            "max(attention, b * (2 * h + 3 * f), 12 * h)",
            source,
            attention=attention,
            b=b,
            h=hidden,
            f=mlp.width,
        )
    values = {"attention": attention, "b": b, "h": hidden, "k": mlp.top_k, "f_e": mlp.width, "f_s": mlp.shared_width}
    return term(
        "teacher forward", "max(attention, b * (3 * h + f_s) + k * b * (2 * h + 3 * f_e), 12 * h)", source, **values
    )
