"""A teacher's memory: its shard of the backbone, and what one forward needs."""

from __future__ import annotations

from disaggkd_cli.planner.memory.layer_tensors import forward_working_set
from disaggkd_cli.planner.memory.weights import FSDP
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload


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
                FSDP + ": the layer, the next all-gather, the previous one's buffer",
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
        FSDP + ": a root unit is not sharded again after its forward",
        b_t=work.teacher_bytes,
        V_t=work.teacher.vocabulary,
        H_t=work.teacher.hidden,
    )
