"""Step times, rates and the bottleneck: what computes, what travels, and who waits for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from disaggkd_cli.layouts import EACH_RANK_SERVES
from disaggkd_cli.losses.divergences import divergence_named
from disaggkd_cli.planner.compute import compute_seconds
from disaggkd_cli.planner.constants import FUSED_LOGIT_TRAFFIC, constant
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.flops import backward_passes, forward_work, loss_flops
from disaggkd_cli.planner.models.tensor_parallel import collective_elements, whole_share
from disaggkd_cli.planner.network import collective_rate, link_rate, replicas_rate, stage_rate
from disaggkd_cli.planner.ring import ring_loss
from disaggkd_cli.planner.stages import slowest_share
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.traffic import traffic
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.planner.writing import WRITING, WritingTimes, writing_times

_GB = 1e9
COLLECTIVES, GATHERS, REDUCTIONS = "collectives of the student", "gathers of the teacher", "all-reduces of the teacher"
STUDENT, TEACHER, LINK = "student", "teacher", "link"
_OVERLAP = "max(compute, collectives) + x * min(compute, collectives)"


@dataclass(frozen=True)
class Timing:
    """Times of one micro-batch in seconds and rates in tokens per second.

    Attributes:
        teacher, student: what one micro-batch takes on one teacher rank and one student rank.
        parts: the tokens/s that each part would allow alone.
        bottleneck: the slowest of them.
        tokens_per_second: of the whole run.
        stall_share: share of the student's time spent waiting for hidden states.
        idle_share: share of the teachers' time without work.
        latency: seconds from a request to its hidden states.
        writing: what it takes that the student writes texts; None where it does not.
    """

    teacher: Term
    student: Term
    parts: tuple[Term, ...]
    bottleneck: str
    tokens_per_second: float
    stall_share: float
    idle_share: float
    latency: float = 0.0
    writing: WritingTimes | None = None

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second of each part, by name."""
        return {part.name: part.value for part in self.parts}


def student_time(work: Workload, *, fused: bool = True) -> Term:
    """Seconds of one micro-batch on one student rank; the optimizer's share included."""
    cluster, gpu, flow = work.cluster, work.cluster.student_gpu, traffic(work)
    per_logit = FUSED_LOGIT_TRAFFIC if fused else 2 * divergence_named(work.divergence).full_logits_bytes
    backward = backward_passes(work)
    compute = compute_seconds(
        "student token",
        gpu,
        forward_work(work.student, work.sequence, work.student_attention),
        sequence=work.sequence,
        passes=1 + backward,
        recomputed=work.checkpointing and backward > 0,
        head=work.supervised * loss_flops(work, fused=fused),
        logits=work.supervised * work.student.vocabulary * per_logit,
        element_bytes=work.student_bytes,
        compiled=work.compiled,
    )
    collectives = (flow.fsdp.value + flow.vocabulary_parallel.value) / (
        collective_rate(cluster, work.shard_ranks, gpu) * _GB
    ) + flow.replicas.value / (replicas_rate(cluster, work.shard_ranks, work.replicate, gpu) * _GB)
    return term(
        "student micro-batch",
        f"k * ({_OVERLAP} + 28 * N * trained / W / (M * A))",
        "compute of T tokens against FSDP's collectives, of which published runs hid little; AdamW's pass over its "
        "states once per step",
        k=work.efficiency.student,
        compute=work.micro_batch_tokens * compute.value,
        collectives=collectives,
        x=KERNELS.exposed,
        N=work.student_parameters.total,
        trained=work.trained,
        W=work.shard_ranks,
        M=gpu.hbm_tb_per_s * 1e12 * constant("hbm_efficiency"),
        A=work.accumulation,
    )


def teacher_time(work: Workload) -> Term:
    """Seconds between two micro-batches of one server of a teacher replica: a rank of its own (FSDP), or all ranks of
    a replica together (tensor, pipeline)."""
    ranks, gpu = work.ranks_per_replica, work.cluster.teacher_gpu
    compute = work.micro_batch_tokens * _teacher_token(work).value
    if ranks == 1:
        return term(
            "teacher micro-batch",
            "k * compute",
            "forward of the backbone, weights resident",
            k=work.efficiency.teacher,
            compute=compute,
        )
    rate = collective_rate(work.cluster, ranks, gpu) * _GB
    if work.parallelism == "tensor":
        return term(
            "teacher micro-batch",
            "k * (compute * (1 - whole + whole * t) / t + T * E * b_t * (t - 1) / t / B)",
            "each rank computes its slices and all that transformers' plan leaves whole; the plan's sums and gathers, "
            "which nothing hides",
            k=work.efficiency.teacher,
            compute=compute,
            t=ranks,
            whole=whole_share(work.teacher),
            T=work.micro_batch_tokens,
            E=collective_elements(work.teacher),
            b_t=work.teacher_bytes,
            B=rate,
        )
    if work.parallelism == "pipeline":
        handover = stage_rate(work.cluster, ranks, gpu)
        return term(
            "teacher micro-batch",
            "k * max(compute * slowest, T * H_t * b_t / B)",
            "a pipeline gives a micro-batch whenever its slowest stage is done; hidden states go from stage to stage "
            "meanwhile",
            k=work.efficiency.teacher,
            compute=compute,
            slowest=slowest_share(work.teacher, ranks),
            T=work.micro_batch_tokens,
            H_t=work.teacher.hidden,
            b_t=work.teacher_bytes,
            B=handover * _GB,
        )
    return term(
        "teacher micro-batch",
        f"k * ({_OVERLAP})",
        "forward of the backbone against gathering it for every micro-batch",
        k=work.efficiency.teacher,
        compute=compute,
        collectives=work.teacher_bytes * work.teacher_parameters.backbone * (ranks - 1) / ranks / rate,
        x=KERNELS.exposed,
    )


def servers(work: Workload) -> int:
    """Parts of the teachers that each answer one request at a time."""
    return work.replicas * (work.ranks_per_replica if work.parallelism in EACH_RANK_SERVES else 1)


def colocated_teacher_time(work: Workload) -> Term:
    """Seconds of the teacher's forward for one micro-batch on one colocated rank."""
    gpu = work.cluster.student_gpu
    rate = collective_rate(work.cluster, work.shard_ranks, gpu) * _GB
    return term(
        "teacher micro-batch",
        f"k * ({_OVERLAP})",
        "forward of the backbone against gathering it from the ranks of one copy of the student",
        k=work.efficiency.teacher,
        compute=work.micro_batch_tokens * _teacher_token(work, colocated=True).value,
        collectives=traffic(work).colocated_teacher.value / rate,
        x=KERNELS.exposed,
    )


def colocated_timing(work: Workload, *, fused: bool) -> Timing:
    """Teacher and student take turns on the same ranks."""
    teacher, student = colocated_teacher_time(work), student_time(work, fused=fused)
    tokens = work.student_ranks * work.micro_batch_tokens
    parts = (
        _rate("teacher forward", "W * T / t", "all ranks, one micro-batch each", work, t=teacher.value),
        _rate(STUDENT, "W * T / t", "all ranks, one micro-batch each", work, t=student.value),
    )
    slowest = "teacher forward" if teacher.value > student.value else STUDENT
    side = teacher if slowest == "teacher forward" else student
    bottleneck = slowest
    if side.values["collectives"] > side.values["compute"]:
        bottleneck = COLLECTIVES if side is student else "gathering the teacher's weights"
    rate = tokens / (teacher.value + student.value)
    share = teacher.value / (teacher.value + student.value)
    timing = Timing(teacher, student, parts, bottleneck, rate, share, 0.0, teacher.value)
    return timing if work.writing is None else _with_writing(work, timing, ring=False)


def disaggregated_timing(work: Workload) -> Timing:
    """Teacher and student work at the same time; the ring evens their jitter out."""
    teacher, student = teacher_time(work), student_time(work, fused=work.implementation == "fused")
    tokens = work.micro_batch_tokens
    if work.cached:
        part = _rate(STUDENT, "W * T / t", "all ranks, one micro-batch each", work, t=student.value)
        return Timing(teacher, student, (part,), _student_name(student), part.value, 0.0, 0.0)
    row_bytes = traffic(work).hidden_states.value * work.supervised
    link = link_rate(work) * _GB
    serving = servers(work)
    stages = work.ranks_per_replica if work.parallelism == "pipeline" else 1
    latency = stages * teacher.value + tokens * row_bytes / link
    if work.ring_depth == 1:
        # The only slot is held while the student computes, so nobody overlaps.
        source = "the one slot is held while the student computes"
        ring = _rate("ring (one slot: no overlap)", "W * T / (t + l)", source, work, t=student.value, l=latency)
    else:
        source = "slots of a rank that are under way, over the time from a request to its hidden states"
        ring = _rate("ring depth", "W * (K - 1) * T / l", source, work, K=work.ring_depth, l=latency)
    parts = (
        _rate(TEACHER, "n * T / t", "n servers, each busy without a gap", work, n=serving, t=teacher.value),
        _rate(STUDENT, "W * T / t", "all ranks, one micro-batch each", work, t=student.value),
        # A replica's hidden states leave through the one rank that serves them.
        _rate(LINK, "min(W, n) * B / b", "links of the ranks that send or receive", work, n=serving, B=link,
              b=max(row_bytes, 1e-9)),
        ring,
    )  # fmt: skip
    rates = {part.name: part.value for part in parts}
    slowest = min(rates, key=rates.get)
    others = sorted(rates.values())
    waiting = (work.ring_depth - 1) - others[0] * latency / (work.student_ranks * tokens) + 1
    lost = ring_loss(work.efficiency.jitter, waiting, others[1] / others[0] - 1) if work.ring_depth > 1 else 0.0
    rate = rates[slowest] * (1 - lost)
    names = {STUDENT: _student_name(student), TEACHER: _teacher_name(work, teacher)}
    timing = Timing(
        teacher,
        student,
        parts,
        names.get(slowest, slowest),
        rate,
        max(0.0, 1 - rate / rates[STUDENT]),
        max(0.0, 1 - rate / rates[TEACHER]),
        latency,
    )
    return timing if work.writing is None else _with_writing(work, timing, ring=True)


def _with_writing(work: Workload, timing: Timing, *, ring: bool) -> Timing:
    """The timing of a run whose student writes between steps, given that of the same without."""
    tokens = work.student_ranks * work.micro_batch_tokens
    stalled = tokens / timing.tokens_per_second
    times = writing_times(work, train=timing.student.value, stalled=stalled, latency=timing.latency, ring=ring)
    batches, window = times.window.values["D"], times.window.value
    own = times.weights.value + times.written.value
    part = _rate(
        WRITING, "D * W * T / w", "all ranks, between steps", work, D=batches, w=own,
    )  # fmt: skip
    rate = batches * tokens / window
    busy = batches * timing.student.value
    return replace(
        timing,
        parts=(*timing.parts, part),
        bottleneck=WRITING if own > window / 2 else timing.bottleneck,
        tokens_per_second=rate,
        stall_share=max(0.0, 1 - (own + busy) / window),
        idle_share=max(0.0, 1 - rate / timing.rates[TEACHER]) if ring else 0.0,
        writing=times,
    )


def recommended_ring_depth(work: Workload) -> int:
    """The smallest depth that keeps every teacher busy and leaves two slots to even out jitter."""
    if work.cached:
        return 2
    timing = disaggregated_timing(work.with_(ring_depth=64, writing=None))
    in_flight = timing.tokens_per_second * timing.latency / (work.student_ranks * work.micro_batch_tokens)
    return max(2, math.ceil(in_flight + 2 - 1e-9))


def _rate(name: str, formula: str, source: str, work: Workload, **values: float) -> Term:
    """Tokens per second that one part allows."""
    return term(name, formula, source, W=work.student_ranks, T=work.micro_batch_tokens, **values)


def _teacher_token(work: Workload, *, colocated: bool = False) -> Term:
    gpu = work.cluster.student_gpu if colocated else work.cluster.teacher_gpu
    return compute_seconds(
        "teacher token",
        gpu,
        forward_work(work.teacher, work.sequence, work.teacher_attention),
        sequence=work.sequence,
        element_bytes=work.teacher_bytes,
    )


def _student_name(student: Term) -> str:
    return COLLECTIVES if student.values["collectives"] > student.values["compute"] else STUDENT


def _teacher_name(work: Workload, teacher: Term) -> str:
    """What the teachers spend most of their time on."""
    values = teacher.values
    if work.ranks_per_replica == 1:
        return TEACHER
    if work.parallelism == "tensor":
        share = (1 - values["whole"]) / values["t"] + values["whole"]
        return REDUCTIONS if teacher.value > 2 * values["k"] * values["compute"] * share else TEACHER
    if work.parallelism == "pipeline":
        return TEACHER
    return GATHERS if values["collectives"] > values["compute"] else TEACHER
