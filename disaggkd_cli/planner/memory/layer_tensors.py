"""Tensors that autograd saves in one decoder layer, in bytes per token; and what a forward without gradients needs.

The formulas list what transformers' modules save in eager mode: b bytes an element in the compute dtype, 4 in float32.
The first term of every layer is its RMSNorms; the input of a projection is the output of the norm before it and is
counted there.
"""

from __future__ import annotations

from disaggkd_cli.config.attention import EAGER
from disaggkd_cli.planner.memory.attention import forward_score_bytes, kernel, masked, repeated
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
_FORWARD = "largest set of tensors alive at once, traced with MemTracker (torch 2.13, transformers 5.24)"
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
    attention: str = "auto",
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
        attention: `student.attention`; see `memory.attention`.
        delta_kernel: `fla` (GPU kernels) or `torch` (transformers' own code, on CPUs).
    """
    return [
        _norms(layer, hidden, compute_bytes),
        _mixer(layer, compute_bytes, sequence, packed, delta_kernel, attention),
        _mlp(layer.mlp, hidden, compute_bytes),
    ]


def _norms(layer: LayerShape, hidden: int, b: int) -> Term:
    after = 2 if layer.norms == 4 else 0
    values = {"h": hidden, "b": b, "before": layer.norms - after, "after": after}
    if layer.float32_norm:
        return term("norms", "before * ((8 + b) * h + 4) + after * (8 * h + 4)", _EAGER, **values)
    return term("norms", "before * ((4 + 2 * b) * h + 4) + after * ((4 + b) * h + 4)", _EAGER, **values)


def _mixer(layer: LayerShape, b: int, sequence: int, packed: bool, delta_kernel: str, attention: str) -> Term:
    mixer = layer.mixer
    if isinstance(mixer, GroupedQueryAttention):
        formula = _attention_formula(mixer, sequence, packed, attention)
        if mixer.qk_norm:
            formula += " + 8 * (q + kv) + 4 * (a + g)" if layer.float32_norm else " + (4 + b) * (q + kv) + 4 * (a + g)"
        if mixer.output_gate:
            formula += " + (3 + b // 4) * b * q"
        values = {
            "b": b,
            "cast": b % 4,
            "q": mixer.q,
            "kv": mixer.kv,
            "a": mixer.heads,
            "g": mixer.kv_heads,
            "S": sequence,
        }
        return term("attention", formula, _EAGER, **values)
    if isinstance(mixer, LatentAttention):
        values = {
            "b": b,
            "cast": b % 4,
            "q": mixer.q,
            "r_q": mixer.query_rank or 0,
            "r": mixer.kv_rank,
            "a": mixer.heads,
        }
        values |= {"d_n": mixer.nope_dim, "d_v": mixer.value_dim}
        values["S"] = sequence if masked(mixer, sequence, packed, attention) else 0
        formula = "(4 + 2 * b) * (r_q + r) + 2 * b * q + b * a * (d_n + d_v) + b * a * d_v + "
        eager = kernel(mixer, attention) == EAGER
        formula += "(4 + cast) * a * S" if eager else "4 * a + b * S"
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


def _attention_formula(mixer: GroupedQueryAttention, sequence: int, packed: bool, attention: str) -> str:
    running = kernel(mixer, attention)
    if running == EAGER and mixer.sinks:
        return "b * 4 * q + b * a * (S + 1) + 8 * a"
    if running == EAGER:
        # The softmax's float32 output and, where that is another dtype, what values are multiplied with.
        kept = "(4 + cast) * a * S"
        return f"b * 4 * q + {kept} + b * a * S" if mixer.softcap else f"b * 4 * q + {kept}"
    if masked(mixer, sequence, packed, attention):
        return "b * (4 * q + S) + 4 * a"
    return f"b * ({'4 * q' if repeated(mixer, sequence, packed, attention) else '2 * q + 2 * kv'}) + 4 * a"


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


def forward_working_set(
    layer: LayerShape,
    hidden: int,
    b: int,
    sequence: int = 0,
    *,
    attention: str = "auto",
    attention_ranks: int = 1,
    mlp_ranks: int = 1,
) -> Term:
    """Bytes per token alive at the fullest moment of one layer's forward without gradients, its input among them.

    Args:
        layer, hidden, b: the layer, h, bytes an element.
        sequence: S; eager attention has its scores in memory, and so S² for a sequence.
        attention: `teacher.attention`; see `memory.attention`.
        attention_ranks, mlp_ranks: ranks that share the heads, and the MLP's width (tensor parallelism).
    """
    mixer, mlp = layer.mixer, layer.mlp
    values = {"b": b, "h": hidden, "S": sequence, "t_a": attention_ranks, "t_m": mlp_ranks}
    if isinstance(mixer, GroupedQueryAttention):
        mixing = "b * (3 * h + (3 * q + 2 * kv + gate) / t_a) + c * a * S / t_a"
        values |= {"q": mixer.q, "kv": mixer.kv, "gate": mixer.q if mixer.output_gate else 0, "a": mixer.heads}
        values["c"] = forward_score_bytes(mixer, attention, b)
    elif isinstance(mixer, LatentAttention):
        mixing = "b * (3 * h + (4 * q + up) / t_a) + c * a * S / t_a"
        values |= {"q": mixer.q, "up": mixer.heads * (mixer.nope_dim + mixer.value_dim), "a": mixer.heads}
        values["c"] = forward_score_bytes(mixer, attention, b)
    else:
        mixing = "b * (3 * h + 2 * (2 * K + Vd) + 3 * Vd)"
        values |= {"K": mixer.keys, "Vd": mixer.values}
    if isinstance(mlp, DenseMLP):
        return term(
            "teacher forward", f"max({mixing}, b * (4 * h + 3 * f / t_m), 12 * h)", _FORWARD, f=mlp.width, **values
        )
    values |= {"k": mlp.top_k, "f_e": mlp.width, "f_s": mlp.shared_width}
    experts = "b * (2 * h + f_s / t_m + k * (2 * h + 4 * f_e / t_m)), b * (4 * h + 4 * k * h)"
    return term("teacher forward", f"max({mixing}, {experts}, 12 * h)", _FORWARD, **values)
