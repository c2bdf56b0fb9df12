"""What fits: memory that a rank may use, the largest micro-batch (the frontier), and what moves it most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.cost import gpus_of
from disaggkd_cli.planner.hardware import GIB, Gpu
from disaggkd_cli.planner.memory import RankMemory, colocated_rank, student_rank, teacher_rank
from disaggkd_cli.planner.network import out_of_reach
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

_CEILING = 1 << 26
_MANY_LINKS = 16
"""Links of a rank from which on doing without their NCCL communicators is offered."""
_SHORT = 256
"""Sequences shorter than this are not offered as a remedy."""


@dataclass(frozen=True)
class Knob:
    """One change of the config, and the largest micro-batch with it."""

    change: str
    max_micro_batch_tokens: int


def usable(work: Workload, role: str) -> Term:
    """Bytes that a rank's tensors may take: the driver's total, less context, communicators and margin, over the
    reserve factor."""
    gpu = gpu_of(work, role)
    ranks = work.ranks_per_replica if role == "teacher" else work.student_ranks
    groups = (1 if ranks > 1 else 0) + (1 if work.replicate > 1 and role != "teacher" else 0)
    return term(
        "usable memory",
        "(total * (1 - margin) - context - fixed - first * min(groups, 1) - more * max(groups - 1, 0) - links * link)"
        " / reserve",
        "driver total; overheads as published (see the constants)",
        total=gpu.memory_bytes,
        margin=constant("margin"),
        context=constant("context_gib") * GIB,
        first=constant("first_communicator_gib") * GIB,
        more=constant("communicator_gib") * GIB,
        groups=groups,
        links=_nccl_links(work, role),
        link=constant("link_communicator_gib") * GIB,
        reserve=work.efficiency.reserve,
        fixed=work.efficiency.fixed_gib * GIB,
    )


def _nccl_links(work: Workload, role: str) -> int:
    """NCCL communicators of a rank's links to the other role."""
    if role == "colocated" or work.cached or not work.nccl_links:
        return 0
    return work.links[role == "teacher"]


def gpu_of(work: Workload, role: str) -> Gpu:
    """The GPU that a role runs on."""
    return work.cluster.teacher_gpu if role == "teacher" else work.cluster.student_gpu


def roles_of(work: Workload, mode: str) -> dict[str, RankMemory]:
    """The kinds of ranks of a mode, and their memory."""
    if mode == "colocated_full":
        return {"colocated": colocated_rank(work, fused=False)}
    if mode == "colocated_fused":
        return {"colocated": colocated_rank(work, fused=True)}
    student = {"student": student_rank(work, fused=work.implementation == "fused")}
    return student if work.cached else {**student, "teacher": teacher_rank(work)}


def largest_teacher(work: Workload, mode: str) -> float:
    """Parameters of the largest teacher with layers as wide as this one's that a mode can hold; 0: none.

    Every further layer adds its share of the weights to each rank that holds the teacher, and nothing else.
    """
    role = "teacher" if mode == "disaggregated_fused" else "colocated"
    if work.cached and role == "teacher":
        return float("inf")
    if role == "teacher" and "student" in overflowing(work, mode):
        return 0.0
    ranks = work.ranks_per_replica if role == "teacher" else work.shard_ranks
    spare = usable(work, role).value - roles_of(work, mode)[role].peak_bytes
    return max(0.0, work.teacher_parameters.total + spare * ranks / work.teacher_bytes)


def fits(work: Workload, mode: str) -> bool:
    """Whether every role of the mode fits its memory, and all ranks reach each other."""
    return not out_of_reach(work, gpus_of(work, mode)) and not overflowing(work, mode)


def overflowing(work: Workload, mode: str) -> dict[str, float]:
    """Bytes that are missing, by role, for the roles that do not fit."""
    missing = {role: memory.peak_bytes - usable(work, role).value for role, memory in roles_of(work, mode).items()}
    return {role: value for role, value in missing.items() if value > 0}


def with_tokens(work: Workload, tokens: int) -> Workload:
    """The same run with another micro-batch; one shorter than a sequence shortens the sequence too."""
    return work.with_(micro_batch_tokens=tokens, sequence=min(work.sequence, tokens))


def frontier(work: Workload, mode: str, role: str | None = None) -> int:
    """The largest micro-batch in tokens, in whole sequences where one fits, that a mode (or one of its roles) can
    hold; 0: none."""
    step = work.sequence
    guess = _guess(work, mode, role)
    largest = _largest(lambda count: _holds(work, mode, role, count * step), _CEILING // step, guess // step)
    if largest:
        return largest * step
    return _largest(lambda tokens: _holds(work, mode, role, tokens), step - 1, guess)


def _guess(work: Workload, mode: str, role: str | None) -> int:
    """About the frontier: memory is close to a straight line over the tokens."""
    near, far = work.sequence, 4 * work.sequence
    try:
        less, more = roles_of(with_tokens(work, near), mode), roles_of(with_tokens(work, far), mode)
    except UserError:
        return near
    crossings = []
    for name, memory in less.items():
        if role in (None, name):
            slope = (more[name].peak_bytes - memory.peak_bytes) / (far - near)
            spare = usable(work, name).value - memory.peak_bytes
            crossings.append(near + spare / slope if slope > 0 else _CEILING)
    return max(1, min(_CEILING, int(min(crossings))))


def _holds(work: Workload, mode: str, role: str | None, tokens: int) -> bool:
    try:
        missing = overflowing(with_tokens(work, tokens), mode)
    except UserError:
        return False
    return not missing if role is None else role not in missing


def _largest(holds: Callable[[int], bool], ceiling: int, guess: int) -> int:
    """The largest number up to `ceiling` that holds, 0 for none; looked for from `guess` outwards."""
    if ceiling < 1:
        return 0
    low, high = 0, ceiling + 1
    at, step = max(1, min(guess, ceiling)), 1
    if holds(at):
        low = at
        while low + step <= ceiling and holds(low + step):
            low, step = low + step, step * 2
        high = min(low + step, ceiling + 1)
    else:
        high = at
        while high - step >= 1 and not holds(high - step):
            high, step = high - step, step * 2
        low = max(high - step, 0)
        if low == 0 and (high == 1 or not holds(1)):
            return 0
        low = max(low, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def knobs(work: Workload, mode: str) -> list[Knob]:
    """Changes that keep the run's meaning, with the frontier that each gives, best first."""
    candidates: list[tuple[str, Workload]] = []
    if not work.checkpointing:
        candidates.append(("student.activation_checkpointing=full", work.with_(checkpointing=True)))
    if work.student_bytes == 4:
        candidates.append(("student.dtype=bfloat16", work.with_(student_bytes=2)))
    candidates.append((f"student.ranks={2 * work.student_ranks}", work.with_(student_ranks=2 * work.student_ranks)))
    if work.replicate > 1:
        candidates.append(("student.replicate=1", work.with_(replicate=1)))
    if work.accumulation > 1:
        candidates.append(("train.accumulation=1", work.with_(accumulation=1)))
    if mode == "disaggregated_fused":
        if work.ring_depth > 2:
            candidates.append(("transport.ring_depth=2", work.with_(ring_depth=2)))
        if not work.cached and work.nccl_links and max(work.links) >= _MANY_LINKS:
            candidates.append(("transport.backend=gloo", work.with_(nccl_links=False)))
        double = 2 * work.ranks_per_replica
        candidates.append((f"teacher.ranks_per_replica={double}", work.with_(ranks_per_replica=double)))
    if work.vocabulary_shards == 1 and work.shard_ranks > 1 and mode != "colocated_full":
        candidates.append(("loss.vocabulary_parallel=true", work.with_(vocabulary_parallel=True)))
    if work.memory_budget > 64 << 20 and mode != "colocated_full":
        candidates.append(("loss.memory_budget=64MiB", work.with_(asked_budget=64 << 20)))
    now = frontier(work, mode)
    found = [Knob(change, frontier(changed, mode)) for change, changed in candidates if not changed.refused]
    return sorted(
        (knob for knob in found if knob.max_micro_batch_tokens > now), key=lambda knob: -knob.max_micro_batch_tokens
    )


def smallest_remedy(work: Workload, mode: str) -> str | None:
    """The smallest change that makes the present micro-batch fit: tried one by one, cheapest first; None when none
    does."""
    shorter = frontier(work, mode)
    if shorter >= work.sequence:
        return f"train.micro_batch_sequences={shorter // work.sequence}"
    order = (
        "backend",
        "memory_budget",
        "accumulation",
        "ring_depth",
        "dtype",
        "checkpointing",
        "replicate",
        "vocabulary",
    )
    helping = [knob for knob in knobs(work, mode) if knob.max_micro_batch_tokens >= work.micro_batch_tokens]
    for word in order:
        for knob in helping:
            if word in knob.change:
                return knob.change
    for factor in (2, 4, 8):
        for change, changed in _more_ranks(work, mode, factor):
            if not changed.refused and fits(changed, mode):
                return change
    if shorter >= _SHORT:
        return f"data.sequence_length={1 << (shorter.bit_length() - 1)} train.micro_batch_sequences=1"
    return None


def _more_ranks(work: Workload, mode: str, factor: int) -> list[tuple[str, Workload]]:
    students, replica = work.student_ranks * factor, work.ranks_per_replica * factor
    checkpointed = "" if work.checkpointing else " student.activation_checkpointing=full"
    more = [(f"student.ranks={students}", work.with_(student_ranks=students))]
    if mode == "disaggregated_fused":
        more.insert(0, (f"teacher.ranks_per_replica={replica}", work.with_(ranks_per_replica=replica)))
        both = work.with_(ranks_per_replica=replica, student_ranks=students)
        more.append((f"student.ranks={students} teacher.ranks_per_replica={replica}", both))
    more.append((f"student.ranks={students}{checkpointed}", work.with_(student_ranks=students, checkpointing=True)))
    return more
