"""The components of a rank's memory, each a term with its formula: states, activations, root unit, layers, loss,
teacher."""

from __future__ import annotations

from dataclasses import replace

from disaggkd_cli.planner import loss as loss_model
from disaggkd_cli.planner.activations import checkpointed_per_token, forward_working_set, saved_per_token
from disaggkd_cli.planner.shapes import DenseMLP
from disaggkd_cli.planner.terms import Term, term, total
from disaggkd_cli.planner.workload import Workload

_FSDP = "FSDP2 of torch 2.13 (_fsdp_param_group.py, _fsdp_collectives.py), checked with FSDPMemTracker"
_STATES = "float32 masters and AdamW, sharded"


def states(work: Workload, *, gradients: bool) -> list[Term]:
    """Sharded masters and moments, and gradients once a reduction has been."""
    values = {"N": work.student_parameters.total, "W": work.shard_ranks}
    trained = {**values, "trained": work.trained}
    terms = [
        term("master weights", "4 * N / W", _STATES, **values),
        term("Adam moments", "o * trained * N / W", _STATES, o=work.optimizer_bytes, **trained),
    ]
    # Every micro-batch is reduced, so after the first of a step its shard of the gradients stays.
    if gradients or work.accumulation > 1:
        terms.append(term("sharded gradients", "4 * trained * N / W", _STATES, **trained))
    return terms


def saved(work: Workload) -> list[Term]:
    """What all layers keep for backward."""
    terms = []
    tokens, hidden, b = work.micro_batch_tokens, work.student.hidden, work.student_bytes
    if work.checkpointing:
        one = checkpointed_per_token(hidden, b)
        terms.append(
            term(
                "saved activations",
                f"T * L * {one.formula}",
                one.source,
                T=tokens,
                L=len(work.student.layers),
                **one.values,
            )
        )
        return terms
    for layer, count in work.student.layer_kinds().items():
        parts = saved_per_token(layer, hidden, b, work.sequence, packed=work.packed, delta_kernel=work.delta_kernel)
        values = {name: value for part in parts for name, value in part.values.items()}
        formula = f"T * L * ({' + '.join(part.formula for part in parts)})"
        name = (
            "saved activations" if count == len(work.student.layers) else f"saved activations ({parts[1].name} layers)"
        )
        terms.append(term(name, formula, parts[1].source, T=tokens, L=count, **values))
    return terms


def without_one_layer(work: Workload, saved: list[Term]) -> Term:
    """The same when one layer's backward is done."""
    return term(
        "saved activations",
        "everything - T * saved",
        "one layer's backward is done",
        everything=total(saved),
        T=work.micro_batch_tokens,
        saved=_layer_saved(work),
    )


def _layer_saved(work: Workload) -> float:
    """Bytes per token that the largest layer saves."""
    options = {"packed": work.packed, "delta_kernel": work.delta_kernel}
    hidden, b = work.student.hidden, work.student_bytes
    return max(
        total(saved_per_token(layer, hidden, b, work.sequence, **options)) for layer in work.student.layer_kinds()
    )


def _transient(work: Workload) -> dict[str, float]:
    """Width of the MLP whose gradients are alive beside what its layer saved."""
    widths = [
        layer.mlp.width
        if isinstance(layer.mlp, DenseMLP)
        else layer.mlp.top_k * (layer.mlp.width + work.student.hidden)
        for layer in work.student.layer_kinds()
    ]
    return {"T": work.micro_batch_tokens, "b": work.student_bytes, "h": work.student.hidden, "f": max(widths)}


def inside(work: Workload) -> list[Term]:
    """Beside all saved tensors: gradients inside the layer, and its recomputed tensors under checkpointing."""
    source = "gradients of two MLP tensors and two hidden states, before what they were saved from is gone"
    return [
        term(
            "one layer's activations",
            "T * (saved * checkpointed + 2 * b * (f + h))",
            source,
            saved=_layer_saved(work),
            checkpointed=int(work.checkpointing),
            **_transient(work),
        )
    ]


def in_one_layer(work: Workload) -> Term:
    """The layer at work: what it saved (or recomputed) and gradients in it, or at its end all its weights'
    gradients."""
    return term(
        "one layer's activations",
        "max(T * (saved + 2 * b * (f + h)), b * G * trained)",
        "saved set of the largest layer and gradients in flight; at the end of its backward its weights' "
        "gradients instead",
        saved=_layer_saved(work),
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
        **_transient(work),
    )


def in_one_saved_layer(work: Workload) -> Term:
    """As `in_one_layer`, where the saved activations count the layer at work already."""
    return term(
        "one layer's activations",
        "max(2 * T * b * (f + h), b * G * trained - T * saved)",
        "gradients in flight; at the end of its backward its weights' gradients, less what it saved",
        saved=_layer_saved(work),
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
        **_transient(work),
    )


def boundary(work: Workload) -> list[Term]:
    """Around the head: the final norm, and the supervised rows."""
    values = {"T": work.micro_batch_tokens, "h": work.student.hidden, "b": work.student_bytes}
    norm = "8 + b" if any(layer.float32_norm for layer in work.student.layers) else "4 + 2 * b"
    return [
        term("final norm", f"T * (({norm}) * h + 4)", "its saved tensors and the final hidden states", **values),
        term("supervised rows", "R * h * b", "gathered from the final hidden states", R=work.rows, **values),
    ]


def root_weights(work: Workload) -> Term:
    """The gathered root unit."""
    return term(
        "root unit, whole",
        "b * G_root * gathered",
        _FSDP + "; embedding, final norm and head stay whole from forward to backward",
        b=work.student_bytes,
        G_root=_root_parameters(work),
        gathered=gathered(work),
    )


def _root_parameters(work: Workload) -> float:
    """Parameters that the root unit gathers; a head that the ranks share, and an embedding tied to it, is no part of
    it."""
    apart = work.student.vocabulary * work.student.hidden if work.vocabulary_shards > 1 else 0
    return work.student_parameters.root - apart


def gathered(work: Workload) -> int:
    """1: whole weights are copies beside their shards. On one rank too, where FSDP2 copies what it need not gather."""
    return 1


def loss(work: Workload, fused: bool) -> list[Term]:
    """Scratch and gradients of the loss."""
    student, teacher = work.student, work.teacher
    sizes = (work.rows, student.vocabulary, teacher.vocabulary, student.hidden, teacher.hidden, work.divergence)
    if not fused:
        return [loss_model.full_logits(*sizes, work.temperature, work.student_bytes).scratch]
    work_done = loss_work(work)
    source = "gradients are ready when the forward pass ends: dH in the compute dtype, dW in float32"
    shards = work.vocabulary_shards
    dh = term("dH", "G * R * h * b", source, G=shards, R=work.rows, h=student.hidden, b=work.student_bytes)
    terms = [work_done.scratch, dh]
    if shards > 1:
        terms.append(
            term(
                "rows of all ranks",
                "G * R * (h * b + H_t * b_t)",
                "each rank holds one shard of the heads and sees every row",
                G=shards,
                R=work.rows,
                h=student.hidden,
                b=work.student_bytes,
                H_t=teacher.hidden,
                b_t=work.teacher_bytes,
            )
        )
        if work.student_bytes < 4:
            terms.append(
                term(
                    "head shard, in 16 bits",
                    "b * V * h",
                    "this rank's float32 shard in the compute dtype",
                    b=work.student_bytes,
                    V=_student_ids(work),
                    h=student.hidden,
                )
            )
    if work.head_trained:
        terms.append(term("dW of the head", "4 * V * h", source, V=_student_ids(work), h=student.hidden))
    return terms


def loss_work(work: Workload) -> loss_model.LossWork:
    """The fused loss of one micro-batch: scratch, FLOPs a row of this rank's own, tile."""
    shards = work.vocabulary_shards
    one = loss_model.fused(
        work.rows * shards,
        _student_ids(work),
        _teacher_ids(work),
        work.student.hidden,
        work.teacher.hidden,
        work.divergence,
        work.memory_budget,
        work.student_bytes,
        work.teacher_bytes,
        device="cpu" if work.cluster.device == "cpu" else work.cluster.student_gpu.name,
        head_trained=work.head_trained,
        joined=shards > 1,
    )
    # Each rank works on the rows of all ranks, but on its own ids only.
    return replace(one, flops_per_row=one.flops_per_row * shards)


def _student_ids(work: Workload) -> int:
    """Ids of the student's head on the rank that keeps most of them."""
    return -(-work.student.vocabulary // work.vocabulary_shards)


def _teacher_ids(work: Workload) -> int:
    """Ids of the teacher's head on the rank that keeps most of them: cut at the student's; the last keeps the rest."""
    block, vocabulary = _student_ids(work), work.teacher.vocabulary
    if work.vocabulary_shards == 1:
        return vocabulary
    return max(min(block, vocabulary), vocabulary - (work.vocabulary_shards - 1) * block)


def head_gradient(work: Workload) -> list[Term]:
    """The head's gradient from the loss to the end of backward: whole, in the compute dtype, waiting for the root's
    reduction; or this rank's shard in float32, final at once."""
    if not work.head_trained:
        return []
    values = {"V": _student_ids(work), "h": work.student.hidden}
    if work.vocabulary_shards > 1:
        return [term("head gradient, this rank's shard", "4 * V * h", "final when the loss is done", **values)]
    source = "waits for the root's reduction at the end of backward"
    return [term("head gradient, whole", "b * V * h", source, b=work.student_bytes, **values)]


def layer_weights(work: Workload, layers: int) -> Term:
    """Gathered weights of one or two layers."""
    return term(
        "layer weights, whole",
        "m * b * G * gathered",
        _FSDP + ": the layer at work, and the next one's all-gather",
        m=layers,
        b=work.student_bytes,
        gathered=gathered(work),
        G=work.student_parameters.largest_layer,
    )


def reducing(work: Workload) -> Term:
    """The layer before, in reduction."""
    return term(
        "layer reduction",
        "r * G * trained",
        _FSDP + ": the reduce-scatter's input of the layer before, in float32",
        r=reduce_bytes(work),
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
    )


def reduce_bytes(work: Workload) -> int:
    """Bytes an element in a reduction: float32. On one rank nothing travels, but the buffer is filled all the same."""
    return 4


def embedding_gradients(work: Workload) -> list[Term]:
    """Whole gradients of the root unit's matrices; where the ranks share the head, of an untied embedding alone."""
    if work.vocabulary_shards > 1 and work.student.tied:
        return [
            term(
                "embedding and head gradients",
                "(8 * V * h + G * T * h * (b + 4)) * trained",
                "this rank's shard: two gradients and their sum, one of which is the final one; gradients of the "
                "embedded tokens of all ranks",
                V=_student_ids(work),
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


def kept_gather(work: Workload) -> Term:
    """The last layer's gathered buffer."""
    return term(
        "last all-gather",
        "b * G * gathered",
        _FSDP + ": a layer's gathered buffer lives until the next one is copied out",
        b=work.student_bytes,
        G=work.student_parameters.largest_layer,
        gathered=1 if work.shard_ranks > 1 else 0,
    )


def root_reduce(work: Workload) -> list[Term]:
    """The reduction of the root unit."""
    return [
        term(
            "root reduction",
            "(b + r) * G_root * trained",
            _FSDP + ": whole gradients and the reduce-scatter's input",
            trained=int(work.root_trained),
            b=work.student_bytes,
            r=reduce_bytes(work),
            G_root=_root_parameters(work),
        )
    ]


def ring(work: Workload) -> list[Term]:
    """The slots for hidden states."""
    return [
        term(
            "ring",
            "K * T * H_t * w",
            "K slots of one micro-batch each, sized for every row",
            K=work.ring_depth,
            T=work.micro_batch_tokens,
            H_t=work.teacher.hidden,
            w=work.wire_bytes,
        )
    ]


def teacher_head(work: Workload) -> Term:
    """The teacher's frozen head."""
    return term(
        "teacher head",
        "b_t * V_t * H_t",
        "frozen, resident on each student rank: whole, or the ids that the rank keeps",
        b_t=work.teacher_bytes,
        V_t=_teacher_ids(work),
        H_t=work.teacher.hidden,
    )


def teacher_shard(work: Workload, ranks: int) -> list[Term]:
    """A shard of the teacher's backbone."""
    return [
        term(
            "teacher weights",
            "b_t * N_t / W_t",
            "the backbone, sharded; the head is apart",
            b_t=work.teacher_bytes,
            N_t=work.teacher_parameters.backbone,
            W_t=ranks,
        )
    ]


def teacher_forward(work: Workload, ranks: int, tensor_parallel: bool) -> list[Term]:
    """What one forward of the teacher needs beside its shard of the weights."""
    teacher = work.teacher
    widest = max(
        (forward_working_set(layer, teacher.hidden, work.teacher_bytes) for layer in teacher.layer_kinds()),
        key=lambda one: one.value,
    )
    terms = [
        term(
            "teacher activations",
            f"T * ({widest.formula}) / t",
            widest.source,
            T=work.micro_batch_tokens,
            t=ranks if tensor_parallel else 1,
            **widest.values,
        ),
        term(
            "teacher residual stream",
            "T * H_t * b_t",
            "final hidden states before the rows are picked",
            T=work.micro_batch_tokens,
            H_t=teacher.hidden,
            b_t=work.teacher_bytes,
        ),
    ]
    if ranks > 1 and not tensor_parallel:
        terms.append(
            term(
                "teacher layers gathered",
                "3 * b_t * G_t",
                _FSDP + ": the layer, the next all-gather, the previous one's buffer",
                b_t=work.teacher_bytes,
                G_t=work.teacher_parameters.largest_layer,
            )
        )
        terms.append(teacher_root(work))
    return terms


def teacher_root(work: Workload) -> Term:
    """The teacher's gathered embedding."""
    return term(
        "teacher embedding, whole",
        "b_t * (V_t + 1) * H_t",
        _FSDP + ": a root unit is not sharded again after its forward",
        b_t=work.teacher_bytes,
        V_t=work.teacher.vocabulary,
        H_t=work.teacher.hidden,
    )
