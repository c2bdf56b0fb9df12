"""The loss on a student rank: scratch and gradients of both heads, the teacher's frozen head, the slots of the ring."""

from __future__ import annotations

from dataclasses import replace

from disaggkd_cli.planner import loss as loss_model
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload


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
                    V=student_ids(work),
                    h=student.hidden,
                )
            )
    if work.head_trained:
        terms.append(term("dW of the head", "4 * V * h", source, V=student_ids(work), h=student.hidden))
    return terms


def loss_work(work: Workload) -> loss_model.LossWork:
    """The fused loss of one micro-batch: scratch, FLOPs a row of this rank's own, tile."""
    shards = work.vocabulary_shards
    one = loss_model.fused(
        work.rows * shards,
        student_ids(work),
        teacher_ids(work),
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


def student_ids(work: Workload) -> int:
    """Ids of the student's head on the rank that keeps most of them."""
    return -(-work.student.vocabulary // work.vocabulary_shards)


def teacher_ids(work: Workload) -> int:
    """Ids of the teacher's head on the rank that keeps most of them: cut at the student's; the last keeps the rest."""
    block, vocabulary = student_ids(work), work.teacher.vocabulary
    if work.vocabulary_shards == 1:
        return vocabulary
    return max(min(block, vocabulary), vocabulary - (work.vocabulary_shards - 1) * block)


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
        V_t=teacher_ids(work),
        H_t=work.teacher.hidden,
    )
