"""Which mode to take, and why, in the words of the guide: small teacher near the student -> colocated and fused; else
apart."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.advice import changes
from disaggkd_cli.planner.cost import comparable, cost_of, gpus_of
from disaggkd_cli.planner.fit import frontier, overflowing, roles_of, smallest_remedy, usable
from disaggkd_cli.planner.network import out_of_reach
from disaggkd_cli.planner.timing import COLLECTIVES, GATHERS, LINK, REDUCTIONS, STUDENT, TEACHER, Timing
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.planner.writing import WRITING
from disaggkd_cli.units import format_bytes

_CLOSE = 0.03
"""Modes whose tokens for the same cost differ by less are equal: the same errors are in both."""
_SMALL_TEACHER = 10e9
_FEW_NODES = 2
_NAMES = {"colocated_full": "colocated with full logits", "colocated_fused": "colocated with the fused loss"}
_NAMES["disaggregated_fused"] = "disaggregated with the fused loss"
_ORDER_NEAR = ("colocated_fused", "disaggregated_fused", "colocated_full")
_ORDER_APART = ("disaggregated_fused", "colocated_fused", "colocated_full")

Modes = dict[str, tuple[Workload, bool, Timing]]


@dataclass(frozen=True)
class Verdict:
    """The recommended mode (None when nothing fits), and the reason in one or two sentences.

    Attributes:
        take: what to rent and set, in words.
        limited_by: the bottleneck, in words.
        change: what would give more, as overrides of the config with their effect; empty when nothing tried does.
    """

    mode: str | None
    reason: str
    take: str = ""
    limited_by: str = ""
    change: str = ""


def decide(modes: Modes, *, advise: bool = True) -> Verdict:
    """Compare the fitting modes by tokens for the same money, or per GPU-hour where a price is not known.

    Among modes that are as good as equal the guide decides: a small teacher with a student on one or two nodes stays
    colocated, which has fewer parts; a teacher of tens of billions of parameters, or a student across more nodes, goes
    apart. Fused goes before full, since it takes less memory.
    """
    fitting = {mode: entry for mode, entry in modes.items() if entry[1]}
    if not fitting:
        work, mode = modes["disaggregated_fused"][0], "disaggregated_fused"
        return Verdict(None, f"no mode fits; nearest is {_NAMES[mode]}: {why_not(work, mode)}")
    costs = [cost_of(work, mode, timing.tokens_per_second) for mode, (work, _, timing) in fitting.items()]
    rate = dict(zip(fitting, comparable(costs), strict=True))
    measure = "tokens for the same money" if all(one.per_hour for one in costs) else "tokens per GPU-hour"
    most = max(rate.values())
    order = _ORDER_NEAR if stays_near(modes["colocated_fused"][0]) else _ORDER_APART
    best = next(mode for mode in order if rate.get(mode, 0.0) >= most * (1 - _CLOSE))
    work, _, timing = modes[best]
    return Verdict(
        best,
        _reason(best, modes, rate, measure),
        take=take_text(work, best),
        limited_by=limit_text(work, timing),
        change=_change_text(work, best) if advise else "",
    )


def stays_near(work: Workload) -> bool:
    """Whether the guide keeps the teacher on the student's ranks: a small teacher, and a student on one or two
    nodes."""
    return work.teacher_parameters.total < _SMALL_TEACHER and _nodes(work) <= _FEW_NODES


def why_not(work: Workload, mode: str) -> str:
    """Which role overflows by how much, the largest terms of its fullest phase, and the smallest change that mends
    it."""
    apart = out_of_reach(work, gpus_of(work, mode))
    if apart:
        return apart
    missing = overflowing(work, mode)
    if not missing:
        return "fits"
    role, bytes_missing = max(missing.items(), key=lambda item: item[1])
    phase = roles_of(work, mode)[role].binding
    parts = [(one.value, one.name) for one in phase.terms]
    allowed = usable(work, role).values
    parts.append((allowed["links"] * allowed["link"], f"communicators of {allowed['links']:,.0f} links"))
    largest = sorted(parts, key=lambda part: -part[0])[:2]
    terms = " and ".join(f"{name} ({format_bytes(value)})" for value, name in largest)
    remedy = smallest_remedy(work, mode)
    mend = f"; {remedy} would make it fit" if remedy else "; no single change tried makes it fit"
    return f"a {role} rank is {format_bytes(bytes_missing)} short in {phase.name}, chiefly {terms}{mend}"


def take_text(work: Workload, mode: str) -> str:
    """What a mode takes: GPUs of each role, the teacher's layout, the micro-batch."""
    name = work.cluster.student_gpu.name
    gpus = f"{work.student_ranks} × {name}"
    if mode == "disaggregated_fused" and not work.cached:
        layout = "" if work.ranks_per_replica == 1 else f" of {work.ranks_per_replica} ({work.parallelism})"
        replicas = f"{work.replicas} replica{'s' if work.replicas > 1 else ''}{layout}"
        gpus = f"{gpus} learn, {work.teacher_ranks} × {work.cluster.teacher_gpu.name} teach in {replicas}"
    elif mode == "disaggregated_fused":
        gpus = f"{gpus} learn from recorded hidden states"
    else:
        gpus = f"{gpus}, teacher and student on each"
    copies = f", {work.replicate} copies of the student" if work.replicate > 1 else ""
    again = "full" if work.checkpointing else "no"
    batch = f"micro-batch {work.micro_batch_tokens:,} tokens" + (
        f" × {work.accumulation}" if work.accumulation > 1 else ""
    )
    return f"{gpus}{copies}; {batch}, {again} activation checkpointing"


def limit_text(work: Workload, timing: Timing) -> str:
    """The bottleneck, and who waits for it."""
    words = {
        STUDENT: "the student's compute",
        WRITING: "the student's writing of its own texts",
        COLLECTIVES: "the student's collectives (gathers and reductions of its shards)",
        TEACHER: "the teachers' compute",
        GATHERS: "gathers of the teachers' weights",
        REDUCTIONS: "all-reduces inside the teachers",
        LINK: "the links between teachers and student",
    }
    waits = ""
    if timing.rates.get(TEACHER) and timing.idle_share >= 0.01:
        waits = f"; teachers are idle {timing.idle_share:.0%} of the time"
    elif timing.rates.get(TEACHER) and timing.stall_share >= 0.01:
        waits = f"; the student waits {timing.stall_share:.0%} of the time"
    return words.get(timing.bottleneck, timing.bottleneck) + waits


def _change_text(work: Workload, mode: str) -> str:
    best = changes(work, mode)[:2]
    cost = "cost" if work.cluster.student_price else "GPU-hour"
    return "; ".join(
        f"{one.overrides} would give {one.speed:+.0%} speed"
        + (f" ({one.worth:+.0%} per {cost})" if abs(one.worth - one.speed) > 0.01 else "")
        for one in best
    )


def _nodes(work: Workload) -> int:
    return -(-work.student_ranks // work.cluster.gpus_per_node)


def _reason(best: str, modes: Modes, rate: dict[str, float], measure: str) -> str:
    why = _why_apart if best == "disaggregated_fused" else _why_together
    return "; ".join(why(best, modes, rate, measure))


def _why_apart(best: str, modes: Modes, rate: dict[str, float], measure: str) -> list[str]:
    colocated, fits, timing = modes["colocated_fused"]
    if not fits:
        return [f"colocated does not fit even with the fused loss: {why_not(colocated, 'colocated_fused')}"]
    apart = modes[best][0]
    gain = rate[best] / rate["colocated_fused"] - 1
    if gain > _CLOSE:
        gathers = timing.teacher.values["collectives"] > timing.teacher.values["compute"]
        slow = "a colocated teacher is gathered for every micro-batch, which takes longer than its forward"
        cause = slow if gathers else "teacher and student compute at the same time, and each keeps its own memory"
        return [f"{gain:.0%} more {measure} than colocated: {cause}"]
    billions, nodes = colocated.teacher_parameters.total / 1e9, _nodes(apart)
    size = f"a teacher of {billions:,.0f} billion parameters"
    sentences = [f"as many {measure} as colocated ({gain:+.0%})"]
    sentences.append(f"{size} and a student on {nodes} node{'s' if nodes > 1 else ''} are better apart")
    return [*sentences, *_bought(apart, colocated)]


def _bought(apart: Workload, colocated: Workload) -> list[str]:
    """What the memory that the teacher no longer takes would buy."""
    there, here = frontier(apart, "disaggregated_fused"), frontier(colocated, "colocated_fused")
    if there <= here:
        return []
    return [f"its memory would hold micro-batches of {there:,} tokens instead of {here:,}"]


def _why_together(best: str, modes: Modes, rate: dict[str, float], measure: str) -> list[str]:
    apart = "disaggregated_fused"
    if apart not in rate:
        sentences = [f"teachers apart do not fit: {why_not(modes[apart][0], apart)}"]
    else:
        gain = rate[apart] / rate[best] - 1
        if gain < -_CLOSE:
            sentences = [f"{-gain:.0%} fewer {measure} with teachers apart: {_what_is_lost(modes[apart][2])}"]
        else:
            why = "has fewer parts" if stays_near(modes[best][0]) else "leaves no GPU waiting"
            sentences = [f"as many {measure} as with teachers apart ({gain:+.0%}), and sharing the ranks {why}"]
    if best == "colocated_fused" and not modes["colocated_full"][1]:
        sentences.append("full logits do not fit")
    return sentences


def _what_is_lost(timing: Timing) -> str:
    if timing.stall_share > timing.idle_share:
        return f"the student would wait {timing.stall_share:.0%} of the time"
    return f"the teachers would be idle {timing.idle_share:.0%} of the time"
