"""Weights, gradients and optimizer state of a student rank under FSDP2: shards, and what is whole at a time."""

from __future__ import annotations

from disaggkd_cli.planner.memory import projection
from disaggkd_cli.planner.memory.heads import student_ids
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

FSDP = "FSDP2 of torch 2.13 (_fsdp_param_group.py, _fsdp_collectives.py), checked with FSDPMemTracker"
_STATES = "float32 masters and AdamW, sharded"
REDUCE_BYTES = 4
"""Bytes an element in a reduction: float32. On one rank nothing travels, but the buffer is filled all the same."""


def states(work: Workload, *, gradients: bool, layers_to_go: int | None = None) -> list[Term]:
    """Sharded masters and moments, and gradients as far as they have been reduced.

    Args:
        gradients: whether any reduction has been.
        layers_to_go: in backward, layers whose gradients are not reduced yet; the root unit's are not either. None:
            all are.
    """
    values = {"N": work.student_parameters.total, "W": work.shard_ranks}
    trained = {**values, "trained": work.trained}
    terms = [
        term("master weights", "4 * N / W", _STATES, **values),
        term("Adam moments", "o * trained * N / W", _STATES, o=work.optimizer_bytes, **trained),
    ]
    # Every micro-batch is reduced, so after the first of a step its shard of the gradients stays.
    whole = work.accumulation > 1 or work.vocabulary_shards > 1
    if gradients and layers_to_go is not None and not whole:
        terms.append(
            term(
                "sharded gradients",
                "4 * trained * max(N_layers - m * G, 0) / W",
                _STATES + ": of the layers whose backward is done; the root unit's come last",
                N_layers=work.student_parameters.layers,
                m=layers_to_go,
                G=work.student_parameters.largest_layer,
                W=work.shard_ranks,
                trained=work.trained,
            )
        )
    elif gradients or work.accumulation > 1:
        terms.append(term("sharded gradients", "4 * trained * N / W", _STATES, **trained))
    return [*terms, *projection.states(work, gradients=(gradients and layers_to_go is None) or work.accumulation > 1)]


def root_weights(work: Workload) -> Term:
    """The gathered root unit."""
    return term(
        "root unit, whole",
        "b * G_root",
        FSDP + "; embedding, final norm and head stay whole from forward to backward",
        b=work.student_bytes,
        G_root=root_parameters(work) + projection.parameters(work),
    )


def root_parameters(work: Workload) -> float:
    """Parameters that the root unit gathers; a head that the ranks share, and an embedding tied to it, is no part of
    it."""
    apart = work.student.vocabulary * work.student.hidden if work.vocabulary_shards > 1 else 0
    return work.student_parameters.root - apart


def kept_gather(work: Workload) -> Term:
    """The last layer's gathered buffer."""
    return term(
        "last all-gather",
        "b * G * sharded",
        FSDP + ": a layer's gathered buffer lives until the next one is copied out",
        b=work.student_bytes,
        G=work.student_parameters.largest_layer,
        sharded=1 if work.shard_ranks > 1 else 0,
    )


def layer_weights(work: Workload, layers: int) -> Term:
    """Gathered weights of one or two layers."""
    return term(
        "layer weights, whole",
        "m * b * G",
        FSDP + ": the layer at work, and the next one's all-gather",
        m=layers,
        b=work.student_bytes,
        G=work.student_parameters.largest_layer,
    )


def reducing(work: Workload) -> Term:
    """The layer before, in reduction."""
    return term(
        "layer reduction",
        "r * G * trained",
        FSDP + ": the reduce-scatter's input of the layer before, in float32",
        r=REDUCE_BYTES,
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
    )


def head_gradient(work: Workload) -> list[Term]:
    """The head's gradient from the loss to the end of backward: whole, in the compute dtype, waiting for the root's
    reduction; or this rank's shard in float32, final at once."""
    if not work.head_trained:
        return []
    values = {"V": student_ids(work), "h": work.student.hidden}
    if work.vocabulary_shards > 1:
        return [term("head gradient, this rank's shard", "4 * V * h", "final when the loss is done", **values)]
    source = "waits for the root's reduction at the end of backward"
    return [term("head gradient, whole", "b * V * h", source, b=work.student_bytes, **values)]


def embedding_gradients(work: Workload) -> list[Term]:
    """Whole gradients of the root unit's matrices; where the ranks share the head, of an untied embedding alone."""
    if work.vocabulary_shards > 1 and work.student.tied:
        return [
            term(
                "embedding and head gradients",
                "(8 * V * h + G * T * h * (b + 4)) * trained",
                "this rank's shard: two gradients and their sum, one of which is the final one; gradients of the "
                "embedded tokens of all ranks",
                V=student_ids(work),
                h=work.student.hidden,
                G=work.vocabulary_shards,
                T=work.micro_batch_tokens,
                b=work.student_bytes,
                trained=int(work.head_trained),
            )
        ]
    copies = 3 if work.student.tied else 2 if work.vocabulary_shards == 1 else 1
    source = "gradients of embedding and head; a tied weight's two and their sum"
    return [
        term(
            "embedding and head gradients",
            "copies * b * V * h",
            source,
            copies=copies if work.head_trained else 0,
            b=work.student_bytes,
            V=work.student.vocabulary,
            h=work.student.hidden,
        )
    ]


def root_reduce(work: Workload) -> list[Term]:
    """The reduction of the root unit."""
    return [
        term(
            "root reduction",
            "(b + r) * G_root * trained",
            FSDP + ": whole gradients and the reduce-scatter's input",
            trained=int(work.root_trained),
            b=work.student_bytes,
            r=REDUCE_BYTES,
            G_root=root_parameters(work),
        ),
        *projection.reduction(work),
    ]
