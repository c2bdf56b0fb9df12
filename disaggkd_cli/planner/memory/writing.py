"""Memory of a student rank while it writes its own texts (`on_policy`): a whole copy of it, and what completions keep.

It is freed before the step begins that trains on them, so gradients and activations never stand beside it.
"""

from __future__ import annotations

from disaggkd_cli.planner.models.shapes import GatedDeltaNet, GroupedQueryAttention, LayerShape
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

STATE_BYTES = 4
"""An element of a delta net's state: float32."""


def gathered_copy(work: Workload) -> Term:
    """The whole student in its compute dtype; on one rank that computes in float32 the masters themselves."""
    return term(
        "gathered copy of the student",
        "b * N * copied",
        "each rank gathers all weights while a window is written (on_policy/gathered.py), and frees them after it; "
        "their dtype is that of the compute",
        b=work.student_bytes,
        N=work.student_parameters.total,
        copied=int(is_copied(work)),
    )


def is_copied(work: Workload) -> bool:
    """Whether writing needs weights beside the masters."""
    return work.shard_ranks > 1 or work.student_bytes < 4


def while_writing(work: Workload) -> list[Term]:
    """All that is there only while a window is written."""
    length = work.writing.prompt_tokens + work.writing.new_tokens
    b, rows, student = work.student_bytes, work.writing_batch, work.student
    layers = [kept_by_layer(layer, length, b) for layer in student.layers]
    return [
        gathered_copy(work),
        term(
            "cache of keys and values",
            "B * cache",
            "of a batch of prompts and completions at their longest: keys and values of each layer, a window's at "
            "most; states of delta nets",
            B=rows,
            cache=sum(layers),
        ),
        term(
            "cache of one layer, being extended",
            "B * layer",
            "transformers' caches join the new token to a copy of the old ones, layer by layer",
            B=rows,
            layer=max(layers),
        ),
        term(
            "probabilities of the next token",
            "B * V * (b + 24)",
            "logits, their scores twice in float32, and twice in float64 (on_policy/sampling.py)",
            B=rows,
            V=student.vocabulary,
            b=b,
        ),
    ]


def kept_by_layer(layer: LayerShape, length: float, element_bytes: int) -> float:
    """Bytes that one layer keeps of one sequence of `length` tokens."""
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNet):
        convolved = (2 * mixer.keys + mixer.values) * mixer.kernel * element_bytes
        return convolved + STATE_BYTES * mixer.value_heads * mixer.key_dim * mixer.value_dim
    if isinstance(mixer, GroupedQueryAttention):
        return 2 * mixer.kv * min(length, mixer.window or length) * element_bytes
    return (mixer.kv_rank + mixer.rope_dim) * length * element_bytes
