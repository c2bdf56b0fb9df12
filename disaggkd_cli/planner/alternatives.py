"""Other ways to run the same distillation, beside the three modes: what each holds, how fast it is, what it costs, and
whether `run` can do it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.cost import Cost, cost_of
from disaggkd_cli.planner.fit import roles_of, usable
from disaggkd_cli.planner.memory import RankMemory, colocated_rank, teacher_rank
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.timing import colocated_timing, disaggregated_timing, recommended_ring_depth, teacher_time
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.units import format_bytes

APART = "disaggregated_fused"
_MOVED_OUT = ("teacher weights", "teacher embedding, whole")
_MOST_STAGES = 64


@dataclass(frozen=True)
class Alternative:
    """One other way.

    Attributes:
        name: `teacher_offloaded`, `recorded`, `pipeline`.
        title: for people.
        runs: whether `run` can do it; `how`: with which keys, or what is missing.
        why_not: why it does not fit or would be refused; None: it fits.
        ranks, usable: memory of each kind of rank, and what its tensors may take.
        tokens_per_second: at steady state.
        figures: what is particular to it, each with its formula.
        notes: the same in sentences.
    """

    name: str
    title: str
    runs: bool
    how: str
    why_not: str | None
    ranks: dict[str, RankMemory]
    usable: dict[str, Term]
    tokens_per_second: float
    cost: Cost
    figures: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def fullest(self) -> str:
        """The kind of rank that has least room left."""
        return max(self.ranks, key=lambda role: self.ranks[role].peak_bytes / self.usable[role].value)


def alternatives(colocated: Workload, apart: Workload, live: Cost | None, gpus: int | None = None) -> list[Alternative]:
    """Return the alternatives to a plan.

    Args:
        colocated: what the colocated mode with the fused loss is planned with.
        apart: what the disaggregated mode is planned with.
        live: cost of the mode that the plan recommends, against which a recording must pay; None: nothing fits.
        gpus: the limit on all GPUs, where there is one.
    """
    if apart.writing is not None:  # what the student will write cannot be recorded before
        return [offloaded(colocated), pipeline(apart, gpus)]
    return [offloaded(colocated), recorded(apart, live), pipeline(apart, gpus)]


def offloaded(work: Workload) -> Alternative:
    """Colocated, and the teacher's shard lies in pinned host memory while the student trains.

    It is loaded once a step, answers all micro-batches of the step, and is dropped: frozen weights need no way back.
    """
    before = colocated_rank(work, fused=True)
    moved = _named(before, _MOVED_OUT)
    shard = moved[0]
    waiting = term(
        "teacher hidden states that wait",
        "(A - 1) * R * H_t * b_t",
        "the teacher answers all micro-batches of a step before the student's first",
        A=work.accumulation,
        R=work.rows,
        H_t=work.teacher.hidden,
        b_t=work.teacher_bytes,
    )
    first, *others = before.phases
    phases = [replace(first, terms=(*first.terms, waiting))]
    for phase in others:
        kept = [one for one in phase.terms if one.name not in _MOVED_OUT]
        phases.append(replace(phase, terms=(*kept, waiting)))
    memory = RankMemory("colocated", tuple(phases))
    freed = term(
        "GPU memory freed while the student trains",
        " + ".join(f"m{index}" for index in range(len(moved))),
        "the teacher's shard, and its embedding that FSDP keeps whole",
        **{f"m{index}": one.value for index, one in enumerate(moved)},
    )
    host = term(
        "host memory of one node",
        "shard * ranks",
        "pinned copies of the shards of the ranks of one node",
        shard=shard.value,
        ranks=min(work.student_ranks, work.cluster.gpus_per_node),
    )
    load = term(
        "load of the teacher, a step",
        "shard / (P * e)",
        "over PCIe at the catalogue's rate, every GPU on lanes of its own; nothing hides it",
        shard=shard.value,
        P=work.cluster.student_gpu.pcie_gb_per_s * 1e9,
        e=constant("pcie_efficiency"),
    )
    timing = colocated_timing(work, fused=True)
    step = work.step_tokens / timing.tokens_per_second + load.value
    rate = work.step_tokens / step
    allowed = usable(work, "colocated")
    peaks = f"a rank's peak from {_gib(before.peak_bytes)} to {_gib(memory.peak_bytes)} (in {memory.binding.name})"
    return Alternative(
        name="teacher_offloaded",
        title="teacher offloaded",
        runs=False,
        how="run has no offload of the teacher's weights: a figure for comparison only",
        why_not=_over({"colocated": memory}, {"colocated": allowed}),
        ranks={"colocated": memory},
        usable={"colocated": allowed},
        tokens_per_second=rate,
        cost=cost_of(work, "colocated_fused", rate),
        figures=(freed, host, load),
        notes=(
            f"colocated, the teacher's weights in host memory while the student trains: frees "
            f"{format_bytes(freed.value)} a rank, {peaks}",
            f"takes {format_bytes(host.value)} of host memory a node, and {load.value:.2f} s a step to load "
            f"({load.value / step:.1%} of the step)",
        ),
    )


def recorded(work: Workload, live: Cost | None) -> Alternative:
    """Hidden states from disk, recorded once by one rank (`disaggkd teacher CONFIG --record DIR`)."""
    exact = work.wire_bytes >= 2
    replay = work.with_(cached=True, wire_bytes=work.wire_bytes if exact else 2.0)
    ranks = roles_of(replay, APART)
    allowed = {role: usable(replay, role) for role in ranks}
    rate = disaggregated_timing(replay).tokens_per_second
    cost = cost_of(replay, APART, rate)
    row = {"H_t": work.teacher.hidden, "w": replay.wire_bytes, "supervised": work.supervised}
    disk = term(
        "bytes on disk",
        "steps * tokens * supervised * H_t * w",
        "one row for each supervised token of the run's steps (training/recorded.py); evaluation apart",
        steps=work.steps,
        tokens=work.step_tokens,
        **row,
    )
    reading = term(
        "read rate, bytes per second",
        "rate * supervised * H_t * w",
        "all student ranks together, at the speed of the student",
        rate=rate,
        **row,
    )
    recorder = work.with_(cached=False, replicas=1, ranks_per_replica=1)
    seconds = term(
        "seconds of one GPU to record",
        "steps * tokens * t / T",
        "the teacher's forward over every token of the run, on one rank; disk writes not counted",
        steps=work.steps,
        tokens=work.step_tokens,
        t=teacher_time(recorder).value,
        T=work.micro_batch_tokens,
    )
    figures = [disk, reading]
    holds = _over({"recorder": teacher_rank(recorder)}, {"recorder": usable(recorder, "teacher")})
    passes = None if holds else _passes_to_repay(work, cost, live, seconds.value)
    if not holds:
        figures.append(seconds)
    if passes is not None:
        figures.append(passes)
    how = "`disaggkd teacher CONFIG --record DIR` once, then teacher.cache=DIR mode=disaggregated"
    if not exact:
        how += " transport.dtype=bfloat16"
    return Alternative(
        name="recorded",
        title="recorded states",
        runs=holds is None,
        how=how if holds is None else f"run reads recordings, but one rank must hold the teacher to record: {holds}",
        why_not=_over(ranks, allowed),
        ranks=ranks,
        usable=allowed,
        tokens_per_second=rate,
        cost=cost,
        figures=tuple(figures),
        notes=(
            f"hidden states of the run's {work.steps * work.step_tokens:,} tokens read from a directory: "
            f"{format_bytes(disk.value)} on disk, read at {reading.value / 1e9:,.2f} GB/s in all"
            + ("" if holds else f"; recording takes one teacher GPU {seconds.value / 3600:,.1f} h"),
            *([] if holds else [_repaid(passes)]),
        ),
    )


def _passes_to_repay(work: Workload, replay: Cost, live: Cost | None, seconds: float) -> Term | None:
    """Passes over the same tokens from which on recording is cheaper than `live`; None: never."""
    if live is None:
        return None
    tokens = work.steps * work.step_tokens
    price = work.cluster.teacher_price
    in_money = bool(live.per_hour and replay.per_hour and price)
    of_live = live.money(tokens) if in_money else live.gpu_hours(tokens)
    of_replay = replay.money(tokens) if in_money else replay.gpu_hours(tokens)
    if of_live <= of_replay:
        return None
    return term(
        "passes that repay the recording",
        "ceil(once / (live - replay))",
        ("money" if in_money else "GPU-hours")
        + " of the recommended mode against those of a replay; disks not counted",
        once=seconds / 3600 * (price if in_money else 1),
        live=of_live,
        replay=of_replay,
    )


def _repaid(passes: Term | None) -> str:
    # A second epoch of one run is shuffled into other micro-batches, which a recording does not know.
    again = (
        "runs that share texts, seed and batch (other losses, learning rates) read it again, a second epoch only with "
        "train.micro_batch_sequences=1, since epochs are shuffled anew into micro-batches"
    )
    if passes is None:
        return f"no number of passes repays it against the recommended mode; {again}"
    if passes.value <= 1:
        return f"already the first pass is cheaper than the recommended mode, the recording counted; {again}"
    return f"repaid from {passes.value:,.0f} passes over the same tokens on; {again}"


def pipeline(work: Workload, gpus: int | None = None) -> Alternative:
    """Teachers apart, each a pipeline: the config's ranks a replica where they hold it, else the fewest that do; as
    many replicas as keep the student busy."""
    work = work.with_(cached=False, parallelism="pipeline", implementation="fused")
    work = work.with_(ranks_per_replica=_stages(work))
    each = work.micro_batch_tokens / teacher_time(work).value
    wanted = disaggregated_timing(work.with_(cached=True)).tokens_per_second / each
    replicas = max(1, math.ceil(wanted - 1e-9))
    if gpus is not None:
        replicas = max(1, min(replicas, (gpus - work.student_ranks) // work.ranks_per_replica))
    work = work.with_(replicas=replicas)
    work = work.with_(ring_depth=max(work.ring_depth, recommended_ring_depth(work)))
    ranks = roles_of(work, APART)
    allowed = {role: usable(work, role) for role in ranks}
    timing = disaggregated_timing(work)
    cost = cost_of(work, APART, timing.tokens_per_second)
    beyond = f"it takes {cost.gpus} GPUs, and there are {gpus}" if gpus is not None and cost.gpus > gpus else None
    return Alternative(
        name="pipeline",
        title="pipeline teachers",
        runs=work.refused is None,
        how=work.refused
        or f"mode=disaggregated teacher.parallelism=pipeline teacher.ranks_per_replica={work.ranks_per_replica} "
        f"teacher.replicas={replicas} transport.ring_depth={work.ring_depth}",
        why_not=work.refused or beyond or _over(ranks, allowed),
        ranks=ranks,
        usable=allowed,
        tokens_per_second=timing.tokens_per_second,
        cost=cost,
        figures=(timing.teacher,),
        notes=(
            f"{replicas} {'teacher' if replicas == 1 else 'teachers'} of {work.ranks_per_replica} stages, the fullest "
            f"stage {_gib(ranks['teacher'].peak_bytes)} of {_gib(allowed['teacher'].value)}; "
            f"limited by {timing.bottleneck}, teachers idle {timing.idle_share:.0%}",
        ),
    )


def _stages(work: Workload) -> int:
    def holds(stages: int) -> bool:
        one = work.with_(ranks_per_replica=stages)
        return one.refused is None and teacher_rank(one).peak_bytes <= usable(one, "teacher").value

    if work.ranks_per_replica > 1 and holds(work.ranks_per_replica):
        return work.ranks_per_replica
    most = max(2, min(_MOST_STAGES, len(work.teacher.layers)))
    return next((stages for stages in range(2, most + 1) if holds(stages)), most)


def _named(memory: RankMemory, names: tuple[str, ...]) -> list[Term]:
    """The terms of those names, each once, in the order of the names."""
    found = {part.name: part for phase in memory.phases for part in phase.terms if part.name in names}
    return [found[name] for name in names if name in found]


def _over(ranks: dict[str, RankMemory], allowed: dict[str, Term]) -> str | None:
    """Which ranks are too full, or None."""
    found = [
        f"a {role} rank needs {_gib(memory.peak_bytes)} of {_gib(allowed[role].value)} in {memory.binding.name}"
        for role, memory in ranks.items()
        if memory.peak_bytes > allowed[role].value
    ]
    return "; ".join(found) or None


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def figures_of(found: list[Alternative]) -> Iterator[tuple[str, Term]]:
    """Every figure that is particular to an alternative, by `alternatives / name / figure`."""
    for one in found:
        for part in one.figures:
            yield f"alternatives / {one.title} / {part.name}", part
