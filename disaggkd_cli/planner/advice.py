"""What to change in a config that fits, by what it would give for what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.cost import comparable, cost_of
from disaggkd_cli.planner.fit import fits
from disaggkd_cli.planner.timing import Timing, colocated_timing, disaggregated_timing
from disaggkd_cli.planner.workload import Workload

_WORTH_SAYING = 0.03


@dataclass(frozen=True)
class Change:
    """One change of the config: what it gives in speed, and in tokens for their cost; 0.1 is a tenth more."""

    overrides: str
    speed: float
    worth: float


def timing_of(work: Workload, mode: str) -> Timing:
    """The timing of a mode."""
    if mode == "disaggregated_fused":
        return disaggregated_timing(work)
    return colocated_timing(work, fused=mode == "colocated_fused")


def changes(work: Workload, mode: str) -> list[Change]:
    """Changes that fit and give at least three percent more for the same cost, best first; where there is none, those
    that give as much more speed."""
    now = timing_of(work, mode).tokens_per_second
    found = []
    for overrides, changed in _candidates(work, mode):
        try:
            if changed.refused or not fits(changed, mode):
                continue
        except UserError:
            continue
        then = timing_of(changed, mode).tokens_per_second
        before, after = comparable([cost_of(work, mode, now), cost_of(changed, mode, then)])
        found.append(Change(overrides, then / now - 1, after / before - 1))
    cheaper = sorted((one for one in found if one.worth >= _WORTH_SAYING), key=lambda one: -one.worth)
    return cheaper or sorted((one for one in found if one.speed >= _WORTH_SAYING), key=lambda one: -one.speed)


def _candidates(work: Workload, mode: str) -> list[tuple[str, Workload]]:
    sequences = work.micro_batch_tokens // work.sequence
    found = []
    if work.checkpointing:
        found.append(("student.activation_checkpointing=none", work.with_(checkpointing=False)))
        if sequences > 1:
            smaller = work.with_(
                checkpointing=False, micro_batch_tokens=work.sequence, accumulation=work.accumulation * sequences
            )
            overrides = (
                "student.activation_checkpointing=none train.micro_batch_sequences=1 "
                f"train.accumulation={smaller.accumulation}"
            )
            found.append((overrides, smaller))
    if not work.compiled and work.cluster.device != "cpu":
        found.append(("student.compile=true", work.with_(compiled=True)))
    if work.student_bytes == 4:
        found.append(("student.dtype=bfloat16", work.with_(student_bytes=2)))
    if work.accumulation > 1 and work.accumulation % 2 == 0 and sequences:
        larger = work.with_(micro_batch_tokens=2 * work.micro_batch_tokens, accumulation=work.accumulation // 2)
        overrides = f"train.micro_batch_sequences={2 * sequences} train.accumulation={larger.accumulation}"
        found.append((overrides, larger))
    if work.replicate == 1 and work.student_ranks % work.cluster.gpus_per_node == 0:
        copies = work.student_ranks // work.cluster.gpus_per_node
        if copies > 1:
            found.append((f"student.replicate={copies}", work.with_(replicate=copies)))
    if mode == "disaggregated_fused" and not work.cached:
        found.append((f"teacher.replicas={work.replicas + 1}", work.with_(replicas=work.replicas + 1)))
        if work.replicas > 1:
            found.append((f"teacher.replicas={work.replicas - 1}", work.with_(replicas=work.replicas - 1)))
        if work.ring_depth < 4:
            found.append((f"transport.ring_depth={work.ring_depth + 2}", work.with_(ring_depth=work.ring_depth + 2)))
    found.append((f"student.ranks={2 * work.student_ranks}", work.with_(student_ranks=2 * work.student_ranks)))
    return found
