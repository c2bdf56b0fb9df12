"""Step times, rates, bottleneck, and what the ring loses to jitter. Efficiencies are assumptions until calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disaggkd_cli.planner.constants import FULL_LOGITS_BYTES, FUSED_LOGIT_TRAFFIC, constant
from disaggkd_cli.planner.flops import student_flops, teacher_flops
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.traffic import collective_rate, link_rate, traffic
from disaggkd_cli.planner.workload import Workload

_GB = 1e9


@dataclass(frozen=True)
class Timing:
    """Times of one micro-batch in seconds and rates in tokens per second.

    Attributes:
        teacher, student: what one micro-batch takes on one teacher rank and one student rank.
        rates: by bottleneck name, the tokens/s that each part would allow alone.
        bottleneck: the slowest of them.
        tokens_per_second: of the whole run.
        stall_share: share of the student's time spent waiting for hidden states.
        idle_share: share of the teachers' time without work.
    """

    teacher: Term
    student: Term
    rates: dict[str, float]
    bottleneck: str
    tokens_per_second: float
    stall_share: float
    idle_share: float


def student_time(work: Workload, *, fused: bool = True) -> Term:
    """Seconds of one micro-batch on one student rank; the optimizer's share included."""
    cluster, gpu = work.cluster, work.cluster.student_gpu
    flow = traffic(work)
    per_logit = FUSED_LOGIT_TRAFFIC if fused else 2 * FULL_LOGITS_BYTES[work.divergence]
    return term(
        "student micro-batch",
        "max(T * F_s / (P * e_s), gathers / B) + R * V * c / M + 28 * N / W / (M * A)",
        "matrix products against FSDP's collectives, whichever is longer; memory traffic of the loss's "
        "pointwise part (c bytes a "
        "logit, derived); AdamW's pass over its states once per step",
        R=work.rows,
        V=work.student.vocabulary,
        c=per_logit,
        T=work.micro_batch_tokens,
        F_s=student_flops(work, fused=fused).value,
        P=gpu.flops,
        e_s=work.efficiency.student,
        gathers=flow.fsdp.value + flow.vocabulary_parallel.value,
        B=collective_rate(cluster, work.shard_ranks, gpu) * _GB,
        N=work.student_parameters.total,
        W=work.shard_ranks,
        M=gpu.hbm_tb_per_s * 1e12 * constant("hbm_efficiency"),
        A=work.accumulation,
    )


def teacher_time(work: Workload) -> Term:
    """Seconds of one micro-batch on one rank of a teacher replica."""
    gpu, ranks = work.cluster.teacher_gpu, work.ranks_per_replica
    tensor = work.parallelism == "tensor"
    gathered = 0 if tensor else work.teacher_bytes * work.teacher_parameters.backbone * (ranks - 1) / ranks
    return term(
        "teacher micro-batch",
        "max(T * F_t / (P * e_t) / t, gathers / B)",
        "forward of the backbone; a replica sharded with FSDP gathers it for every micro-batch",
        T=work.micro_batch_tokens,
        F_t=teacher_flops(work).value,
        P=gpu.flops,
        e_t=work.efficiency.teacher,
        t=ranks if tensor else 1,
        gathers=gathered,
        B=collective_rate(work.cluster, ranks, gpu) * _GB,
    )


def colocated_teacher_time(work: Workload) -> Term:
    """Seconds of the teacher's forward for one micro-batch on one colocated rank."""
    cluster, gpu = work.cluster, work.cluster.student_gpu
    return term(
        "teacher micro-batch",
        "max(T * F_t / (P * e_t), gathers / B)",
        "forward of the backbone against gathering it from the ranks of one replica, whichever is longer",
        T=work.micro_batch_tokens,
        F_t=teacher_flops(work).value,
        P=gpu.flops,
        e_t=work.efficiency.teacher,
        gathers=traffic(work).colocated_teacher.value,
        B=collective_rate(cluster, work.shard_ranks, gpu) * _GB,
    )


def colocated_timing(work: Workload, *, fused: bool) -> Timing:
    """Teacher and student take turns on the same ranks."""
    teacher, student = colocated_teacher_time(work), student_time(work, fused=fused)
    tokens = work.student_ranks * work.micro_batch_tokens
    values = teacher.values
    gathers = values["gathers"] / values["B"]
    rates = {
        "teacher forward": tokens / teacher.value,
        "student": tokens / student.value,
    }
    bottleneck = min(rates, key=rates.get)
    if bottleneck == "teacher forward" and gathers >= teacher.value:
        bottleneck = "gathering the teacher's weights"
    rate = tokens / (teacher.value + student.value)
    share = teacher.value / (teacher.value + student.value)
    return Timing(teacher, student, rates, bottleneck, rate, share, 0.0)


def disaggregated_timing(work: Workload) -> Timing:
    """Teacher and student work at the same time; the ring evens their jitter out."""
    teacher, student = teacher_time(work), student_time(work)
    tokens = work.micro_batch_tokens
    if work.cached:
        rate = work.student_ranks * tokens / student.value
        return Timing(teacher, student, {"student": rate}, "student", rate, 0.0, 0.0)
    servers = work.replicas * (1 if work.parallelism == "tensor" else work.ranks_per_replica)
    row_bytes = traffic(work).hidden_states.value * work.supervised
    link = link_rate(work.cluster) * _GB
    rates = {
        "teacher": servers * tokens / teacher.value,
        "student": work.student_ranks * tokens / student.value,
        "link": min(work.student_ranks, work.teacher_ranks) * link / max(row_bytes, 1e-9),
    }
    latency = teacher.value + tokens * row_bytes / link
    if work.ring_depth == 1:
        # The only slot is held while the student computes, so nobody overlaps.
        rates["ring (one slot: no overlap)"] = work.student_ranks * tokens / (student.value + latency)
    else:
        rates["ring depth"] = work.student_ranks * (work.ring_depth - 1) * tokens / latency
    bottleneck = min(rates, key=rates.get)
    others = sorted(rates.values())
    waiting = (work.ring_depth - 1) - others[0] * latency / (work.student_ranks * tokens) + 1
    lost = ring_loss(work.efficiency.jitter, waiting, others[1] / others[0] - 1) if work.ring_depth > 1 else 0.0
    rate = rates[bottleneck] * (1 - lost)
    return Timing(
        teacher,
        student,
        rates,
        bottleneck,
        rate,
        max(0.0, 1 - rate / rates["student"]),
        max(0.0, 1 - rate / rates["teacher"]),
    )


def ring_loss(jitter: float, slots: float, slack: float) -> float:
    """Share of the throughput lost to jitter, with `slots` batches of buffer and a partner that is `slack` faster.

    From two slots on, the heavy-traffic form of a bounded queue between two stages of variation `jitter`, its
    constant fitted to simulations (without slack: `1.2 jitter^2 / slots`). With one, each batch takes the longer of
    the two stages' times. Tested against `simulate.py`."""
    if jitter <= 0:
        return 0.0
    if slots >= 2:
        return _queue_loss(jitter, slots, slack)
    one, two = _pair_loss(jitter, slack), _queue_loss(jitter, 2, slack)
    return one + (two - one) * max(slots - 1, 0.0)


def _queue_loss(jitter: float, slots: float, slack: float) -> float:
    variance = 1.2 * jitter**2
    exponent = max(slack, 0.0) * slots / variance
    if exponent < 1e-6:
        return min(variance / slots, 0.5)
    return 0.0 if exponent > 50 else min(slack / math.expm1(exponent), variance / slots, 0.5)


def _pair_loss(jitter: float, slack: float) -> float:
    """1 - 1 / E[max(X, Y)] for two normal times with means 1 and 1 / (1 + slack)."""
    gap = 1 - 1 / (1 + max(slack, 0.0))
    spread = jitter * math.sqrt(2)
    density = math.exp(-((gap / spread) ** 2) / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(gap / spread / math.sqrt(2))) / 2
    return 1 - 1 / (below + (1 - gap) * (1 - below) + spread * density)


def recommended_ring_depth(work: Workload) -> int:
    """The smallest depth that keeps every teacher busy and leaves two slots to even out jitter."""
    if work.cached:
        return 2
    teacher = teacher_time(work)
    timing = disaggregated_timing(work.with_(ring_depth=64))
    in_flight = timing.tokens_per_second * teacher.value / (work.student_ranks * work.micro_batch_tokens)
    return max(2, math.ceil(in_flight + 2 - 1e-9))
