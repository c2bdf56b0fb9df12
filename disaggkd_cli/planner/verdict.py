"""Which mode to take, and why, in the words of the guide: small teacher near the student -> colocated and fused; else
apart."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.cost import comparable, cost_of, gpus_of
from disaggkd_cli.planner.fit import overflowing, roles_of, smallest_remedy
from disaggkd_cli.planner.memory import colocated_rank, student_rank
from disaggkd_cli.planner.network import out_of_reach
from disaggkd_cli.planner.timing import Timing
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.units import format_bytes

_CLOSE = 0.10
"""Modes whose tokens per GPU-hour differ by less are equal: uncalibrated times are no better than that."""
_SMALL_TEACHER = 10e9
_FEW_NODES = 2
_NAMES = {"colocated_full": "colocated with full logits", "colocated_fused": "colocated with the fused loss"}
_NAMES["disaggregated_fused"] = "disaggregated with the fused loss"


@dataclass(frozen=True)
class Verdict:
    """The recommended mode (None when nothing fits), and the reason in one or two sentences."""

    mode: str | None
    reason: str


def decide(modes: dict[str, tuple[Workload, bool, Timing]]) -> Verdict:
    """Compare the fitting modes by tokens for the same money, or per GPU-hour where a price is not known.

    Among modes that are as good as equal the guide decides: a small teacher with a student on one or two nodes stays
    colocated, which has fewer parts; a teacher of tens of billions of parameters, or a student across more nodes, goes
    apart, which leaves each side its memory. Fused goes before full, since it takes less memory.
    """
    fitting = {mode: entry for mode, entry in modes.items() if entry[1]}
    if not fitting:
        work, mode = modes["disaggregated_fused"][0], "disaggregated_fused"
        return Verdict(None, f"no mode fits; nearest is {_NAMES[mode]}: {why_not(work, mode)}")
    costs = [cost_of(work, mode, timing.tokens_per_second) for mode, (work, _, timing) in fitting.items()]
    rate = dict(zip(fitting, comparable(costs), strict=True))
    measure = "tokens for the same money" if all(one.per_hour for one in costs) else "tokens per GPU-hour"
    best = max(rate, key=rate.get)
    near = stays_near(modes["colocated_fused"][0])
    order = ("colocated_fused", "disaggregated_fused", "colocated_full")
    for mode in order if near else ("disaggregated_fused", "colocated_fused", "colocated_full"):
        if rate.get(mode, 0.0) >= rate[best] * (1 - _CLOSE):
            best = mode
            break
    return Verdict(best, _reason(best, modes, rate, measure))


def stays_near(work: Workload) -> bool:
    """Whether the guide keeps the teacher on the student's ranks: a small teacher, and a student on one or two
    nodes."""
    return work.teacher_parameters.total < _SMALL_TEACHER and _nodes(work) <= _FEW_NODES


def _nodes(work: Workload) -> int:
    return -(-work.student_ranks // work.cluster.gpus_per_node)


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
    largest = sorted(phase.terms, key=lambda one: -one.value)[:2]
    terms = " and ".join(f"{one.name} ({format_bytes(one.value)})" for one in largest)
    remedy = smallest_remedy(work, mode)
    mend = f"; {remedy} would make it fit" if remedy else "; no single change tried makes it fit"
    return f"a {role} rank is {format_bytes(bytes_missing)} short in {phase.name}, chiefly {terms}{mend}"


_Modes = dict[str, tuple[Workload, bool, Timing]]


def _reason(best: str, modes: _Modes, rate: dict[str, float], measure: str) -> str:
    if best == "disaggregated_fused":
        sentences = _why_apart(modes, rate, measure)
    else:
        sentences = _why_together(best, modes, rate, measure)
    return "; ".join([*sentences, f"the bottleneck is the {modes[best][2].bottleneck}"])


def _why_apart(modes: _Modes, rate: dict[str, float], measure: str) -> list[str]:
    colocated, fits, timing = modes["colocated_fused"]
    if not fits:
        return [f"colocated does not fit even with the fused loss: {why_not(colocated, 'colocated_fused')}"]
    gain = rate["disaggregated_fused"] / rate["colocated_fused"] - 1
    if gain > _CLOSE:
        gathers = timing.bottleneck == "gathering the teacher's weights"
        slow = "a colocated teacher is gathered for every micro-batch, which takes longer than its forward"
        cause = slow if gathers else "teacher and student compute at the same time and each keeps its own memory"
        return [f"{gain:.0%} more {measure} than colocated: {cause}"]
    apart = modes["disaggregated_fused"][0]
    freed = colocated_rank(colocated, fused=True).peak_bytes - student_rank(apart).peak_bytes
    billions, nodes = colocated.teacher_parameters.total / 1e9, _nodes(apart)
    sentences = [f"as many {measure} as colocated ({gain:+.0%})"]
    if freed > 0:
        sentences.append(f"{format_bytes(freed)} less on each student rank")
    size = f"a teacher of {billions:,.0f} billion parameters"
    sentences.append(f"{size} and a student on {nodes} node{'s' if nodes > 1 else ''} are better apart")
    return sentences


def _why_together(best: str, modes: _Modes, rate: dict[str, float], measure: str) -> list[str]:
    apart = "disaggregated_fused"
    if apart not in rate:
        sentences = [f"teachers apart do not fit: {why_not(modes[apart][0], apart)}"]
    else:
        gain = rate[apart] / rate[best] - 1
        why = "has fewer parts" if stays_near(modes[best][0]) else "leaves no GPU waiting"
        sentences = [f"teachers apart would give {gain:+.0%} {measure}; sharing the student's ranks {why}"]
    if best == "colocated_fused" and not modes["colocated_full"][1]:
        sentences.append("full logits do not fit")
    return sentences
