"""Memory of one rank by component and by phase. The peak is the fullest phase; which one that is, is named.

The student is sharded with FSDP2, each decoder layer a unit of its own; embedding, final norm and head are in the root
unit, which stays whole from forward to backward. Master weights, gradients and Adam's moments are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.layouts import Layout
from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.memory import activations, heads, projection, teacher, weights, writing
from disaggkd_cli.planner.terms import Term, term, total
from disaggkd_cli.planner.workload import Workload


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
    held = [*heads.ring(work), heads.teacher_head(work)]
    return RankMemory("student", (*_student_phases(work, held, fused), *_writing(work, held)))


def colocated_rank(work: Workload, *, fused: bool) -> RankMemory:
    """A rank that holds a shard of the student and a shard of the teacher."""
    # Full logits are formed from whole heads. The teacher lies in shards over the ranks of one replica of the student.
    work = work if fused else work.with_(vocabulary_parallel=False)
    ranks = work.shard_ranks
    layout = Layout("fsdp", ranks)
    shard = teacher.teacher_weights(work, layout)
    hidden = term(
        "teacher hidden states",
        "R * H_t * b_t",
        "rows of the current micro-batch",
        R=work.rows,
        H_t=work.teacher.hidden,
        b_t=work.teacher_bytes,
    )
    working = [shard, *teacher.teacher_forward(work, layout), heads.teacher_head(work)]
    forward = Phase("teacher forward", (*weights.states(work, gradients=False), *working))
    held = [shard, hidden, heads.teacher_head(work), *([teacher.teacher_root(work)] if ranks > 1 else [])]
    return RankMemory("colocated", (forward, *_student_phases(work, held, fused), *_writing(work, held)))


def teacher_rank(work: Workload) -> RankMemory:
    """A rank of a teacher replica: the backbone's weights and one forward; no head, no cache, no gradients."""
    buffers = term(
        "send buffers",
        "min(2 * links, most) * R * H_t * w",
        "two replies of each link on the way or being filled, and at most so many of all links (request_queue.py)",
        links=work.links[1],
        most=constant("most_replies"),
        R=work.rows,
        H_t=work.teacher.hidden,
        w=work.wire_bytes,
    )
    working = [teacher.teacher_weights(work, work.layout), *teacher.teacher_forward(work, work.layout)]
    phase = Phase("teacher forward", (*working, buffers))
    return RankMemory("teacher", (phase,))


def _writing(work: Workload, held: list[Term]) -> list[Phase]:
    """The phase between steps in which the student writes, where it does: no gradients and no activations are left."""
    if work.writing is None:
        return []
    states = weights.states(work.with_(accumulation=1), gradients=False)
    return [Phase("writing", (*states, *writing.while_writing(work), *held))]


def _student_phases(work: Workload, held: list[Term], fused: bool) -> list[Phase]:
    early = weights.states(work, gradients=False)

    def done_but(layers: int) -> list[Term]:
        return weights.states(work, gradients=True, layers_to_go=layers)

    saved = activations.saved(work)
    root = weights.root_weights(work)
    loss = heads.loss(work, fused)
    logits = activations.router_logits(work)
    boundary = activations.boundary(work)
    if work.trained == 0:
        return [Phase("loss", (*early, *saved, root, *boundary, *logits, *loss, *held))]
    gradient = weights.head_gradient(work)
    before = (*early, *saved, root, weights.kept_gather(work))
    phases = [Phase("loss", (*before, *boundary, *logits, *loss, *held))]
    if work.hidden_loss:
        # It comes when the fused loss's scratch is gone, and its backward before that of the fused loss; full logits
        # are still there.
        kept = loss[1:] if fused else loss
        phases.append(Phase("hidden loss", (*before, *boundary, *logits, *kept, *projection.rows(work), *held)))
    if fused and work.head_trained and work.student_bytes < 4:
        # dW is cast while its float32 form is still there; the scratch is gone.
        phases.append(Phase("loss backward", (*before, boundary[0], *loss[1:], *gradient, *held)))
    # Without checkpointing the layer at work is among those that `saved` counts, and the one before it is done.
    at_work = activations.in_one_layer(work) if work.checkpointing else activations.in_one_saved_layer(work)
    rest = saved if work.checkpointing else [activations.without_one_layer(work, saved)]
    phases += [
        # Nothing is being reduced yet when the last layer's backward begins, and all other layers' tensors are still
        # there.
        Phase(
            "last layer backward",
            (*before[:-1], boundary[0], *gradient, weights.layer_weights(work, 2), *activations.inside(work), *held),
        ),
        Phase(
            "layer backward",
            (
                *early,
                *rest,
                root,
                *gradient,
                weights.layer_weights(work, 2),
                weights.reducing(work),
                at_work,
                *held,
            ),
        ),
        Phase(
            "second layer backward",
            (
                *done_but(2),
                activations.of_layers(work, 2 if work.checkpointing else 1),
                root,
                *gradient,
                weights.layer_weights(work, 2),
                weights.reducing(work),
                activations.in_one_layer(work),
                *held,
            ),
        ),
        Phase(
            "first layer backward",
            (
                *done_but(1),
                root,
                *(gradient if work.vocabulary_shards == 1 else []),
                weights.layer_weights(work, 1),
                weights.reducing(work),
                activations.in_one_layer(work),
                *held,
            ),
        ),
        Phase(
            "embedding backward",
            (*done_but(0), root, *weights.embedding_gradients(work), weights.reducing(work), *held),
        ),
        Phase("root reduce", (*done_but(0), *weights.root_reduce(work), *held)),
        Phase("optimizer", (*weights.states(work, gradients=True), *held)),
    ]
    return phases
