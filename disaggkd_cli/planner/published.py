"""Published and traced memory figures of other trainers, and the same closed forms for them: the validation set.

What was fitted: the bytes per logit (14, 12, 4, 24) and the saved sets of compiled and selectively checkpointed layers
were chosen by reading code with these tables in sight. What was not: parameter counts, states, saved sets of eager
layers, FSDP's working set. Sources: torchtitan's documents (TT), torchtune's memory tables (TU), FSDPMemTracker with a
fake process group and torch 2.13 (MT).
"""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.memory.layer_tensors import saved_per_token
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.shapes import ModelShape
from disaggkd_cli.planner.terms import total

GIB = 2**30


@dataclass(frozen=True)
class PublishedRow:
    """One measured configuration. `band` is the relative error that the closed form must stay within.

    Attributes:
        saved: eager, compiled, selective (projections and attention of a layer kept), full (layer inputs).
        state_bytes: per parameter and shard, at the fullest moment.
        logit_bytes: per token and vocabulary entry.
        extra: further terms: `fsdp` (whole root), `reserved` (root, head gradient, 6 bytes a parameter of the largest
            layer), `reserved again` (and one eager layer's recomputed tensors), `last_layer` (one layer's saved set).
        masked: attention got a [S, S] mask.
    """

    name: str
    model: str
    measured_gib: float
    band: float
    tokens: int
    sequence: int
    ranks: int
    saved: str
    state_bytes: float
    logit_bytes: float
    extra: str = ""
    masked: bool = False


ROWS = (
    PublishedRow("TU-1 eager", "llama-3.2-3b", 60.0, 0.02, 8192, 4096, 1, "eager", 6, 12),
    PublishedRow("TU-2 + compile", "llama-3.2-3b", 51.0, 0.02, 8192, 4096, 1, "compiled", 6, 12),
    PublishedRow("TU-3 + chunked CE", "llama-3.2-3b", 42.9, 0.02, 8192, 4096, 1, "compiled", 6, 4),
    PublishedRow("TU-4 + full checkpointing", "llama-3.2-3b", 24.9, 0.02, 8192, 4096, 1, "none", 8, 0, "last_layer"),
    PublishedRow("TU-5 + optimizer in backward", "llama-3.2-3b", 23.1, 0.02, 8192, 4096, 1, "full", 6, 4),
    PublishedRow("TU-6 + activation offload", "llama-3.2-3b", 21.8, 0.02, 8192, 4096, 1, "none", 6, 4),
    PublishedRow("TU-7 + 8-bit AdamW", "llama-3.2-3b", 17.6, 0.10, 8192, 4096, 1, "none", 4, 4),
    PublishedRow(
        "TT-1 FSDP8 selective", "llama-3.1-8b", 82.4, 0.05, 16384, 8192, 8, "selective", 16, 14, "reserved again"
    ),
    PublishedRow("TT-2 + compile", "llama-3.1-8b", 77.0, 0.05, 16384, 8192, 8, "selective", 16, 14, "reserved"),
    PublishedRow(
        "TT-3 FSDP128 selective", "llama-3.1-8b", 67.0, 0.05, 16384, 8192, 128, "selective", 16, 14, "reserved again"
    ),
    PublishedRow("TT-4 + compile", "llama-3.1-8b", 62.0, 0.05, 16384, 8192, 128, "selective", 16, 14, "reserved"),
    PublishedRow(
        "TT-5 full checkpointing, S 32768", "llama-3.1-8b", 83.9, 0.05, 32768, 32768, 8, "full", 16, 14, "reserved"
    ),
    PublishedRow("MT-1 CE", "qwen3-0.6b", 3.02, 0.02, 512, 512, 8, "eager", 12, 12, "fsdp", True),
    PublishedRow("MT-2 CE", "qwen3-0.6b", 17.10, 0.02, 4096, 4096, 8, "eager", 12, 12, "fsdp", True),
    PublishedRow("MT-3 KL, checkpointing", "qwen3-0.6b", 15.30, 0.02, 4096, 4096, 8, "full", 12, 24, "fsdp", True),
    PublishedRow("MT-4 CE, checkpointing", "qwen3-8b", 21.98, 0.02, 4096, 4096, 8, "full", 12, 12, "fsdp", True),
    PublishedRow("MT-5 KL", "qwen3-8b", 60.18, 0.02, 4096, 4096, 8, "eager", 12, 24, "fsdp", True),
    PublishedRow("MT-6 KL, checkpointing", "llama-3.1-8b", 38.98, 0.02, 8192, 8192, 8, "full", 12, 24, "fsdp", True),
    PublishedRow("MT-7 CE", "llama-3.1-8b", 29.43, 0.02, 2048, 2048, 8, "eager", 12, 12, "fsdp", True),
)


def predict_gib(row: PublishedRow) -> float:
    """The closed form of one row, in GiB."""
    shape = resolve_model(row.model, row.name)
    counted = count_parameters(shape)
    saved = row.tokens * len(shape.layers) * _saved(row, shape)
    states = row.state_bytes * counted.total / row.ranks
    logits = row.logit_bytes * row.tokens * shape.vocabulary
    return (states + saved + logits + _extra(row, shape)) / GIB


def _saved(row: PublishedRow, shape: ModelShape) -> float:
    layer, h = shape.layers[0], shape.hidden
    q, kv, a, f = layer.mixer.q, layer.mixer.kv, layer.mixer.heads, layer.mlp.width
    return {
        "none": 0,
        "full": 2 * h,
        "eager": total(saved_per_token(layer, h, 2, row.sequence if row.masked else 0, packed=True)),
        # Torchtune's compiled layers keep norms in bfloat16 and recompute the activation's product; K and V stay
        # repeated.
        "compiled": 8 * h + 8 * q + 6 * f + 4 * a + 8,
        "selective": 2 * (2 * h + 2 * q + kv + f) + 4 * a,
    }[row.saved]


def _extra(row: PublishedRow, shape: ModelShape) -> float:
    counted, h = count_parameters(shape), shape.hidden
    if row.extra == "last_layer":
        compiled = PublishedRow(row.name, row.model, 0, 0, row.tokens, row.sequence, 1, "compiled", 0, 0)
        return row.tokens * _saved(compiled, shape)
    if row.extra.startswith("reserved"):
        working = 2 * counted.root + 2 * shape.vocabulary * h + 6 * counted.largest_layer
        if not row.extra.endswith("again"):
            return working
        # What selective checkpointing did not keep is there again while a layer's backward runs, and two gradients of
        # its MLP and its input; a compiled layer computes it piece by piece.
        eager = PublishedRow(row.name, row.model, 0, 0, row.tokens, row.sequence, 1, "eager", 0, 0)
        again = _saved(eager, shape) - _saved(row, shape) + 4 * (shape.layers[0].mlp.width + h)
        return working + row.tokens * again
    if row.extra == "fsdp":
        return 2 * counted.root + 2 * counted.largest_layer + row.tokens * (8 * h + 4)
    return 0.0
