"""Which mode to take, and why, in the words of the guide: small teacher near the student -> colocated and fused; else
apart."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.planner.fit import overflowing, roles_of, smallest_remedy
from disaggkd_cli.planner.timing import Timing
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.units import format_bytes

_CLOSE = 0.05
_NAMES = {"colocated_full": "colocated with full logits", "colocated_fused": "colocated with the fused loss"}
_NAMES["disaggregated_fused"] = "disaggregated with the fused loss"


@dataclass(frozen=True)
class Verdict:
    """The recommended mode (None when nothing fits), and the reason in one or two sentences."""

    mode: str | None
    reason: str


def gpus_of(work: Workload, mode: str) -> int:
    """GPUs that a mode takes."""
    return work.student_ranks + (work.teacher_ranks if mode == "disaggregated_fused" else 0)


def decide(modes: dict[str, tuple[Workload, bool, Timing]]) -> Verdict:
    """Compare the fitting modes by tokens per GPU-second; colocated and fused wins ties within 5 %."""
    fitting = {mode: entry for mode, entry in modes.items() if entry[1]}
    if not fitting:
        work, mode = modes["disaggregated_fused"][0], "disaggregated_fused"
        return Verdict(None, f"no mode fits; nearest is {_NAMES[mode]}: {why_not(work, mode)}")
    rate = {mode: timing.tokens_per_second / gpus_of(work, mode) for mode, (work, _, timing) in fitting.items()}
    best = max(rate, key=rate.get)
    # Among modes as good as equal: fused before full (it takes less memory), together before apart (it has fewer
    # parts).
    for mode in ("colocated_fused", "colocated_full"):
        if rate.get(mode, 0.0) >= rate[best] * (1 - _CLOSE):
            best = mode
            break
    return Verdict(best, _reason(best, modes, rate))


def why_not(work: Workload, mode: str) -> str:
    """Which role overflows by how much, the largest terms of its fullest phase, and the smallest change that mends
    it."""
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


def _reason(best: str, modes: dict[str, tuple[Workload, bool, Timing]], rate: dict[str, float]) -> str:
    work, _, timing = modes[best]
    apart = "disaggregated_fused"
    sentences = []
    if best == apart:
        colocated = modes["colocated_fused"]
        if not colocated[1]:
            sentences.append(
                f"colocated does not fit even with the fused loss: {why_not(colocated[0], 'colocated_fused')}"
            )
        else:
            gain = rate[apart] / rate["colocated_fused"] - 1
            cause = _why_apart_is_faster(colocated[2])
            sentences.append(f"{gain:.0%} more tokens per GPU-hour than colocated: {cause}")
        nodes = -(-work.student_ranks // work.cluster.gpus_per_node)
        if nodes > 2:
            sentences.append(f"the student spans {nodes} nodes, where gathering the teacher as well is slowest")
        sentences.append(f"the bottleneck is the {timing.bottleneck}")
    else:
        if apart in rate:
            sentences.append(
                f"the teacher is small enough to share the student's ranks: teachers apart would give "
                f"{rate[apart] / rate[best] - 1:+.0%} tokens per GPU-hour, for more parts"
            )
        else:
            sentences.append(f"teachers apart do not fit: {why_not(modes[apart][0], apart)}")
        if best == "colocated_fused" and not modes["colocated_full"][1]:
            sentences.append("full logits do not fit")
    return "; ".join(sentences)


def _why_apart_is_faster(colocated: Timing) -> str:
    if colocated.bottleneck == "gathering the teacher's weights":
        return "a colocated teacher must be gathered for every micro-batch, which takes longer than its forward"
    return "teacher and student compute at the same time and each keeps its own memory"
