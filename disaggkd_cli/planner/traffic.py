"""Bytes on every link: per token between teacher and student, per micro-batch inside a sharded model."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload


@dataclass(frozen=True)
class Traffic:
    """What travels. Per-token figures are per supervised token; collectives are per micro-batch and rank, sent or
    received."""

    hidden_states: Term
    logits: Term
    top_k: Term
    request: Term
    fsdp: Term
    replicas: Term
    colocated_teacher: Term
    vocabulary_parallel: Term


def traffic(work: Workload) -> Traffic:
    """The bytes of one run's links."""
    width, vocabulary = work.teacher.hidden, work.teacher.vocabulary
    return Traffic(
        hidden_states=term("hidden states", "H_t * w", "payload of one row", H_t=width, w=work.wire_bytes),
        logits=term("logits", "2 * V_t", "bfloat16 logits of one row, for comparison", V_t=vocabulary),
        top_k=term("top-64", "6 * k", "int32 id and bfloat16 value, for comparison; exact only for k = V", k=64),
        request=term(
            "request",
            "4 + 4 * supervised + 4 / S",
            "int32 token ids, row indices, and one length a document",
            supervised=work.supervised,
            S=work.sequence,
        ),
        fsdp=_fsdp(work),
        replicas=_replicas(work),
        colocated_teacher=term(
            "teacher all-gather",
            "b_t * N_t * (W - 1) / W",
            "colocated: the whole backbone once per micro-batch, forward only, within one replica of the student",
            b_t=work.teacher_bytes,
            N_t=work.teacher_parameters.backbone,
            W=work.shard_ranks,
        ),
        vocabulary_parallel=term(
            "vocabulary-parallel rows",
            "bytes * shared",
            "rows gathered to every shard of the heads, and the gradients of the student's rows reduced; for a tied "
            "weight the embedding's rows and their gradients too (losses/placement.py)",
            bytes=work.head_traffic.rows_bytes,
            shared=int(work.vocabulary_shards > 1),
        ),
    )


def _fsdp(work: Workload) -> Term:
    parameters = work.student_parameters
    return term(
        "FSDP collectives",
        "(b * (N - A) + b * N_layers + 4 * trained * (N - A)) * (W - 1) / W",
        "all-gather in forward, again in backward (the root stays whole), reduce-scatter of float32 "
        "gradients, for every micro-batch; a head that the ranks share stays where it is",
        b=work.student_bytes,
        N=parameters.total,
        A=work.student.vocabulary * work.student.hidden if work.vocabulary_shards > 1 else 0,
        N_layers=parameters.layers,
        trained=work.trained,
        W=work.shard_ranks,
    )


def _replicas(work: Workload) -> Term:
    return term(
        "all-reduce over the student's replicas",
        "2 * 4 * trained * N / W * (C - 1) / C",
        "each rank's shard of the float32 gradients, for every micro-batch, with the ranks of the C replicas that hold "
        "the same shard",
        trained=work.trained,
        N=work.student_parameters.total,
        W=work.shard_ranks,
        C=work.replicate,
    )
