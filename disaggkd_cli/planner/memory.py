"""Memory of one rank by component and by phase. The peak is the fullest phase; which one that is, is named.

The student is sharded with FSDP2, each decoder layer a unit of its own, embedding, final norm and head in the root
unit, which
stays whole from forward to backward. Master weights, gradients and Adam's moments are float32; `b` bytes an element
in compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner import loss as loss_model
from disaggkd_cli.planner.activations import checkpointed_per_token, forward_working_set, saved_per_token
from disaggkd_cli.planner.shapes import DenseMLP
from disaggkd_cli.planner.terms import Term, term, total
from disaggkd_cli.planner.workload import Workload

_FSDP = "FSDP2 of torch 2.13 (_fsdp_param_group.py, _fsdp_collectives.py), checked with FSDPMemTracker"
_STATES = "float32 masters and AdamW, sharded"


@dataclass(frozen=True)
class Phase:
    """One moment of a step, and what is alive in it."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        return total(self.terms)


@dataclass(frozen=True)
class RankMemory:
    """The phases of one kind of rank."""

    role: str
    phases: tuple[Phase, ...]

    @property
    def binding(self) -> Phase:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def peak_bytes(self) -> float:
        return self.binding.bytes


def student_rank(work: Workload, *, fused: bool = True) -> RankMemory:
    """A student rank of a disaggregated run."""
    held = [*_ring(work), _teacher_head(work)]
    return RankMemory("student", tuple(_student_phases(work, held, fused)))


def colocated_rank(work: Workload, *, fused: bool) -> RankMemory:
    """A rank that holds a shard of the student and a shard of the teacher."""
    ranks = work.student_ranks
    teacher = _teacher_shard(work, ranks)
    hidden = term(
        "teacher hidden states", "R * H_t * b_t", "rows of the current micro-batch",
        R=work.rows, H_t=work.teacher.hidden, b_t=work.teacher_bytes,
    )  # fmt: skip
    working = [*teacher, *_teacher_forward(work, ranks, False), _teacher_head(work)]
    forward = Phase("teacher forward", (*_states(work, gradients=False), *working))
    held = [*teacher, hidden, _teacher_head(work), *([_teacher_root(work)] if ranks > 1 else [])]
    return RankMemory("colocated", (forward, *_student_phases(work, held, fused)))


def teacher_rank(work: Workload) -> RankMemory:
    """A rank of a teacher replica: the backbone's weights and one forward; no head, no cache, no gradients."""
    buffers = term(
        "send buffers", "2 * R * H_t * w", "one payload on the way, one being filled",
        R=work.rows, H_t=work.teacher.hidden, w=work.wire_bytes,
    )  # fmt: skip
    ranks = work.ranks_per_replica
    working = [*_teacher_shard(work, ranks), *_teacher_forward(work, ranks, work.parallelism == "tensor")]
    phase = Phase("teacher forward", (*working, buffers))
    return RankMemory("teacher", (phase,))


def largest_layer_bytes(work: Workload) -> float:
    """Bytes of FSDP's working set in backward for the largest layer: the warning light of MoE students."""
    parameters, b = work.student_parameters.largest_layer, work.student_bytes
    return (2 * b * _gathered(work) + b + _reduce_bytes(work)) * parameters


def _student_phases(work: Workload, held: list[Term], fused: bool) -> list[Phase]:
    early = _states(work, gradients=False)
    late = _states(work, gradients=True)
    saved = _saved(work)
    root = _root_weights(work)
    loss = _loss(work, fused)
    boundary = _boundary(work)
    if work.trained == 0:
        return [Phase("loss", (*early, *saved, root, *boundary, *loss, *held))]
    gradient = _head_gradient(work)
    before = (*early, *saved, root, _kept_gather(work))
    phases = [Phase("loss", (*before, *boundary, *loss, *held))]
    if fused and work.head_trained and work.student_bytes < 4:
        # dW is cast while its float32 form is still there; the scratch is gone.
        phases.append(Phase("loss backward", (*before, boundary[0], *loss[1:], *gradient, *held)))
    # Without checkpointing the layer at work is among those that `saved` counts, and the one before it is done.
    at_work = _in_one_layer(work) if work.checkpointing else _in_one_saved_layer(work)
    rest = saved if work.checkpointing else [_without_one_layer(work, saved)]
    phases += [
        # Nothing is being reduced yet when the last layer's backward begins, and all other layers' tensors are still
        # there.
        Phase(
            "last layer backward",
            (*before[:-1], boundary[0], *gradient, _layer_weights(work, 2), *_inside(work), *held),
        ),
        Phase(
            "layer backward", (*early, *rest, root, *gradient, _layer_weights(work, 2), _reducing(work), at_work, *held)
        ),
        Phase(
            "first layer backward",
            (*late, root, *gradient, _layer_weights(work, 1), _reducing(work), _in_one_layer(work), *held),
        ),
        Phase("embedding backward", (*late, root, *_embedding_gradients(work), _reducing(work), *held)),
        Phase("root reduce", (*late, *_root_reduce(work), *held)),
        Phase("optimizer", (*late, *held)),
    ]
    return phases


def _states(work: Workload, *, gradients: bool) -> list[Term]:
    values = {"N": work.student_parameters.total, "W": work.shard_ranks}
    trained = {**values, "trained": work.trained}
    terms = [
        term("master weights", "4 * N / W", _STATES, **values),
        term("Adam moments", "o * trained * N / W", _STATES, o=work.optimizer_bytes, **trained),
    ]
    if gradients:
        terms.append(term("sharded gradients", "4 * trained * N / W", _STATES, **trained))
    if work.accumulation > 1:
        terms.append(
            term(
                "accumulated whole gradients", "4 * trained * N",
                "without reduction between micro-batches FSDP2 keeps whole gradients, in the reduce dtype", **trained,
            )
        )  # fmt: skip
    return terms


def _saved(work: Workload) -> list[Term]:
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


def _without_one_layer(work: Workload, saved: list[Term]) -> Term:
    return term(
        "saved activations", "everything - T * saved", "one layer's backward is done",
        everything=total(saved), T=work.micro_batch_tokens, saved=_layer_saved(work),
    )  # fmt: skip


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


def _inside(work: Workload) -> list[Term]:
    """Beside all saved tensors: gradients inside the layer, and its recomputed tensors under checkpointing."""
    source = "gradients of the MLP's product and of its last matrix, before their saved tensors are gone"
    return [
        term(
            "one layer's activations", "T * (saved * checkpointed + b * (f + h)) + b * h * f_m", source,
            saved=_layer_saved(work), checkpointed=int(work.checkpointing), f_m=_dense_width(work), **_transient(work),
        )
    ]  # fmt: skip


def _in_one_layer(work: Workload) -> Term:
    """The layer at work: what it saved (or recomputed) and gradients in it, or at its end all its weights'
    gradients."""
    return term(
        "one layer's activations", "max(T * (saved + b * (f + h)) + b * h * f_m, b * G * trained)",
        "saved set of the largest layer and gradients in flight; at the end of its backward its weights' "
        "gradients instead",
        saved=_layer_saved(work), f_m=_dense_width(work), G=work.student_parameters.largest_layer,
        trained=1 if work.trained else 0, **_transient(work),
    )  # fmt: skip


def _in_one_saved_layer(work: Workload) -> Term:
    """As `_in_one_layer`, where the saved activations count the layer at work already."""
    return term(
        "one layer's activations", "max(T * b * (f + h) + b * h * f_m, b * G * trained - T * saved)",
        "gradients in flight; at the end of its backward its weights' gradients, less what it saved",
        saved=_layer_saved(work), f_m=_dense_width(work), G=work.student_parameters.largest_layer,
        trained=1 if work.trained else 0, **_transient(work),
    )  # fmt: skip


def _dense_width(work: Workload) -> int:
    """Width of the widest dense MLP; experts' weight gradients are counted with their layer."""
    return max((layer.mlp.width for layer in work.student.layer_kinds() if isinstance(layer.mlp, DenseMLP)), default=0)


def _boundary(work: Workload) -> list[Term]:
    values = {"T": work.micro_batch_tokens, "h": work.student.hidden, "b": work.student_bytes}
    norm = "8 + b" if any(layer.float32_norm for layer in work.student.layers) else "4 + 2 * b"
    return [
        term("final norm", f"T * (({norm}) * h + 4)", "its saved tensors and the final hidden states", **values),
        term("supervised rows", "R * h * b", "gathered from the final hidden states", R=work.rows, **values),
    ]


def _root_weights(work: Workload) -> Term:
    return term(
        "root unit, whole", "b * G_root * gathered", _FSDP + "; embedding, final norm and head stay whole from forward to backward",
        b=work.student_bytes, G_root=_root_parameters(work), gathered=_gathered(work),
    )  # fmt: skip


def _root_parameters(work: Workload) -> float:
    """Parameters that the root unit gathers; a vocabulary-parallel head stays in shards."""
    parameters = work.student_parameters
    return parameters.root - parameters.head * (1 - 1 / _vocabulary_shards(work))


def _gathered(work: Workload) -> int:
    """0 where whole weights are the shards themselves: one rank, float32."""
    return 0 if work.shard_ranks == 1 and work.student_bytes == 4 else 1


def _loss(work: Workload, fused: bool) -> list[Term]:
    student, teacher = work.student, work.teacher
    sizes = (work.rows, student.vocabulary, teacher.vocabulary, student.hidden, teacher.hidden, work.divergence)
    if not fused:
        return [loss_model.full_logits(*sizes).scratch]
    work_done = loss_work(work)
    source = "gradients are ready when the forward pass ends: dH in the compute dtype, dW in float32"
    terms = [work_done.scratch, term("dH", "R * h * b", source, R=work.rows, h=student.hidden, b=work.student_bytes)]
    if work.vocabulary_parallel:
        terms.append(
            term(
                "rows of all ranks", "G * R * (h * b + H_t * b_t)", "each rank holds one shard of the heads and sees every row",
                G=work.student_ranks, R=work.rows, h=student.hidden, b=work.student_bytes, H_t=teacher.hidden,
                b_t=work.teacher_bytes,
            )
        )  # fmt: skip
    if work.head_trained:
        terms.append(
            term(
                "dW of the head",
                "4 * V * h / G",
                source,
                V=student.vocabulary,
                h=student.hidden,
                G=_vocabulary_shards(work),
            )
        )
    return terms


def loss_work(work: Workload) -> loss_model.LossWork:
    """The fused loss of one micro-batch: scratch, FLOPs a row, tile."""
    shards = _vocabulary_shards(work)
    rows = work.rows * (work.student_ranks if work.vocabulary_parallel else 1)
    return loss_model.fused(
        rows, -(-work.student.vocabulary // shards), -(-work.teacher.vocabulary // shards), work.student.hidden,
        work.teacher.hidden, work.divergence, work.memory_budget, work.student_bytes, work.teacher_bytes,
        device=work.cluster.device, head_trained=work.head_trained,
    )  # fmt: skip


def _vocabulary_shards(work: Workload) -> int:
    return work.student_ranks if work.vocabulary_parallel else 1


def _head_gradient(work: Workload) -> list[Term]:
    if not work.head_trained:
        return []
    return [
        term(
            "head gradient, whole", "b * V * h / G", "waits for the root's reduction at the end of backward",
            b=work.student_bytes, V=work.student.vocabulary, h=work.student.hidden, G=_vocabulary_shards(work),
        )
    ]  # fmt: skip


def _layer_weights(work: Workload, layers: int) -> Term:
    return term(
        "layer weights, whole", "m * b * G * gathered", _FSDP + ": the layer at work, and the next one's all-gather",
        m=layers, b=work.student_bytes, gathered=_gathered(work), G=work.student_parameters.largest_layer,
    )  # fmt: skip


def _reducing(work: Workload) -> Term:
    return term(
        "layer reduction", "r * G * trained", _FSDP + ": the reduce-scatter's input of the layer before, in float32",
        r=_reduce_bytes(work), G=work.student_parameters.largest_layer, trained=1 if work.trained else 0,
    )  # fmt: skip


def _reduce_bytes(work: Workload) -> int:
    return 4 if work.shard_ranks > 1 else 0


def _embedding_gradients(work: Workload) -> list[Term]:
    copies = 3 if work.student.tied else 2
    source = "gradients of embedding and head; a tied weight's two and their sum"
    return [
        term(
            "embedding and head gradients", "copies * b * V * h", source,
            copies=copies if work.head_trained else 0, b=work.student_bytes, V=work.student.vocabulary, h=work.student.hidden,
        )
    ]  # fmt: skip


def _kept_gather(work: Workload) -> Term:
    return term(
        "last all-gather", "b * G * gathered", _FSDP + ": a layer's gathered buffer lives until the next one is copied out",
        b=work.student_bytes, G=work.student_parameters.largest_layer, gathered=1 if work.shard_ranks > 1 else 0,
    )  # fmt: skip


def _root_reduce(work: Workload) -> list[Term]:
    return [
        term(
            "root reduction", "(b + r) * G_root", _FSDP + ": whole gradients and the reduce-scatter's input",
            b=work.student_bytes, r=_reduce_bytes(work), G_root=_root_parameters(work),
        )
    ]  # fmt: skip


def _ring(work: Workload) -> list[Term]:
    return [
        term(
            "ring", "K * T * H_t * w", "K slots of one micro-batch each, sized for every row",
            K=work.ring_depth, T=work.micro_batch_tokens, H_t=work.teacher.hidden, w=work.wire_bytes,
        )
    ]  # fmt: skip


def _teacher_head(work: Workload) -> Term:
    return term(
        "teacher head", "b_t * V_t * H_t / G", "frozen, resident on each student rank",
        b_t=work.teacher_bytes, V_t=work.teacher.vocabulary, H_t=work.teacher.hidden, G=_vocabulary_shards(work),
    )  # fmt: skip


def _teacher_shard(work: Workload, ranks: int) -> list[Term]:
    return [
        term(
            "teacher weights", "b_t * N_t / W_t", "the backbone, sharded; the head is apart",
            b_t=work.teacher_bytes, N_t=work.teacher_parameters.backbone, W_t=ranks,
        )
    ]  # fmt: skip


def _teacher_forward(work: Workload, ranks: int, tensor_parallel: bool) -> list[Term]:
    """What one forward of the teacher needs beside its shard of the weights."""
    teacher = work.teacher
    widest = max(
        (forward_working_set(layer, teacher.hidden, work.teacher_bytes) for layer in teacher.layer_kinds()),
        key=lambda one: one.value,
    )
    terms = [
        term(
            "teacher activations", f"T * ({widest.formula}) / t", widest.source,
            T=work.micro_batch_tokens, t=ranks if tensor_parallel else 1, **widest.values,
        ),
        term(
            "teacher residual stream", "T * H_t * b_t", "final hidden states before the rows are picked",
            T=work.micro_batch_tokens, H_t=teacher.hidden, b_t=work.teacher_bytes,
        ),
    ]  # fmt: skip
    if ranks > 1 and not tensor_parallel:
        terms.append(
            term(
                "teacher layers gathered", "3 * b_t * G_t", _FSDP + ": the layer, the next all-gather, the previous one's buffer",
                b_t=work.teacher_bytes, G_t=work.teacher_parameters.largest_layer,
            )
        )  # fmt: skip
        terms.append(_teacher_root(work))
    return terms


def _teacher_root(work: Workload) -> Term:
    return term(
        "teacher embedding, whole", "b_t * (V_t + 1) * H_t", _FSDP + ": a root unit is not sharded again after its forward",
        b_t=work.teacher_bytes, V_t=work.teacher.vocabulary, H_t=work.teacher.hidden,
    )  # fmt: skip
