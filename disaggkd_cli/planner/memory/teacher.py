"""A teacher's memory: its shard of the backbone, and what one forward needs."""

from __future__ import annotations

from disaggkd_cli.layouts import Layout
from disaggkd_cli.planner.memory.attention import mask_bytes
from disaggkd_cli.planner.memory.layer_tensors import forward_working_set
from disaggkd_cli.planner.memory.weights import FSDP
from disaggkd_cli.planner.models.tensor_parallel import cut_ranks, whole_parameters
from disaggkd_cli.planner.stages import fullest_stage
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload


def teacher_weights(work: Workload, layout: Layout) -> Term:
    """The fullest rank's part of the backbone; the head is apart."""
    shape, counted, b = work.teacher, work.teacher_parameters, work.teacher_bytes
    if layout.kind == "pipeline":
        return term(
            "teacher weights",
            "stage",
            "bytes of the fullest stage of the pipeline: its layers, and the embedding on the first" + _held_as(work),
            stage=fullest_stage(shape, layout.ranks, b, work.quantised),
        )
    if layout.kind == "tensor":
        return term(
            "teacher weights",
            "b_t * ((N_t - whole) / W_t + whole)",
            "what transformers' plan cuts, and what every rank holds whole: embedding, norms, routers, all that the "
            "plan does not name",
            b_t=b,
            N_t=counted.backbone,
            whole=whole_parameters(shape),
            W_t=layout.ranks,
        )
    if layout.kind == "one rank" and work.quantised:
        return term(
            "teacher weights",
            "backbone",
            "bytes of the backbone; the head is apart" + _held_as(work),
            backbone=fullest_stage(shape, 1, b, work.quantised),
        )
    return term(
        "teacher weights",
        "b_t * N_t / W_t",
        "the backbone, sharded; the head is apart",
        b_t=b,
        N_t=counted.backbone,
        W_t=layout.ranks,
    )


def _held_as(work: Workload) -> str:
    held = work.quantised
    return f"; matrices as {held.method}, {held.weight_bytes:.3g} bytes a weight" if held else ""


def teacher_forward(work: Workload, layout: Layout) -> list[Term]:
    """What one forward of the teacher needs beside its part of the weights."""
    teacher, b, count = work.teacher, work.teacher_bytes, work.micro_batch_tokens
    heads, mlp = cut_ranks(teacher, layout)
    widest = max(
        (
            forward_working_set(
                layer, teacher.hidden, b, work.sequence,
                attention=work.teacher_attention, attention_ranks=heads, mlp_ranks=mlp,
            )
            for layer in teacher.layer_kinds()
        ),
        key=lambda one: one.value,
    )  # fmt: skip
    masks = mask_bytes(teacher.layer_kinds(), work.sequence, work.packed, work.teacher_attention, b)
    terms = [term("teacher activations", f"T * ({widest.formula})", widest.source, T=count, **widest.values)]
    if masks:
        terms.append(
            term(
                "attention masks",
                "T * m * S",
                "a [S, S] mask for each sequence and kind of attention (memory/attention.py)",
                T=count,
                m=masks,
                S=work.sequence,
            )
        )
    if layout.kind == "pipeline":
        terms.append(
            term(
                "states between stages",
                "2 * T * H_t * b_t",
                "one micro-batch being received and one being sent while a third is computed",
                T=count,
                H_t=teacher.hidden,
                b_t=work.teacher_bytes,
            )
        )
    if layout.kind == "fsdp":
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
