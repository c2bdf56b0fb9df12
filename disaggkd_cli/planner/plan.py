"""The plan of a run: the three modes side by side, the verdict, and everything as plain data for `--json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from disaggkd_cli.planner.advice import timing_of
from disaggkd_cli.planner.alternatives import Alternative, alternatives, figures_of
from disaggkd_cli.planner.constants import CONSTANTS, ERROR_BANDS, NOT_MODELLED
from disaggkd_cli.planner.cost import Cost, cost_of
from disaggkd_cli.planner.fit import Knob, fits, frontier, knobs, largest_teacher, roles_of, usable
from disaggkd_cli.planner.flops import student_flops, teacher_flops
from disaggkd_cli.planner.memory import RankMemory
from disaggkd_cli.planner.split import Split, as_workload, batches, ideal_ratio, replicas_that_divide, splits
from disaggkd_cli.planner.terms import Term
from disaggkd_cli.planner.timing import Timing, colocated_timing, recommended_ring_depth
from disaggkd_cli.planner.traffic import Traffic, traffic
from disaggkd_cli.planner.verdict import Verdict, decide, why_not
from disaggkd_cli.planner.workload import MODES, Workload


@dataclass(frozen=True)
class ModePlan:
    """One mode: does it fit, what each kind of rank holds, how fast it is, and how far it could go."""

    mode: str
    work: Workload
    fits: bool
    ranks: dict[str, RankMemory]
    usable: dict[str, Term]
    timing: Timing
    max_micro_batch_tokens: int
    max_teacher_parameters: float
    why_not: str | None
    knobs: list[Knob] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return self.cost.gpus

    @property
    def cost(self) -> Cost:
        """GPUs, GPU-hours and money of this mode at its speed."""
        return cost_of(self.work, self.mode, self.timing.tokens_per_second)


@dataclass(frozen=True)
class Plan:
    """What `plan` knows of one config."""

    work: Workload
    modes: dict[str, ModePlan]
    verdict: Verdict
    traffic: Traffic
    ratio: float
    ring_depth: int
    splits: list[Split]
    gpus: int | None = None

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """Other ways to run the same."""
        chosen = self.modes[self.verdict.mode].cost if self.verdict.mode else None
        return alternatives(self.modes["colocated_fused"].work, self.work, chosen, self.gpus)


def make_plan(work: Workload, gpus: int | None = None, *, with_knobs: bool = True) -> Plan:
    """Plan `work` in all three modes.

    Args:
        gpus: a limit on all GPUs together. Ranks, replicas, the teacher's layout, checkpointing and micro-batch are
            then chosen anew, for each mode the best (see `split.py`).
        with_knobs: also what moves the largest micro-batch, and what to change.
    """
    divided = splits(work, gpus) if gpus else []
    works = _searched(work, gpus, divided) if gpus else dict.fromkeys(MODES, work)
    # Full logits are formed from whole heads.
    works["colocated_full"] = works["colocated_full"].with_(vocabulary_parallel=False)
    modes = {mode: _mode_plan(works[mode], mode, with_knobs, gpus) for mode in MODES}
    compared = {mode: (one.work, one.fits, one.timing) for mode, one in modes.items()}
    verdict = decide(compared, advise=with_knobs)
    apart = works["disaggregated_fused"]
    return Plan(
        apart, modes, verdict, traffic(apart), ideal_ratio(apart), recommended_ring_depth(apart), divided[:5], gpus
    )


def _searched(work: Workload, gpus: int, divided: list[Split]) -> dict[str, Workload]:
    """The best run of each mode on at most `gpus` GPUs; one that does not fit where none does."""
    colocated = work.with_(student_ranks=gpus, replicate=replicas_that_divide(work, gpus))
    found = {}
    for mode in ("colocated_full", "colocated_fused"):
        fused = mode == "colocated_fused"
        fitting = [one for one in batches(colocated) if fits(one, mode)]
        found[mode] = max(
            fitting, key=lambda one: colocated_timing(one, fused=fused).tokens_per_second, default=colocated
        )
    if divided:
        apart = as_workload(work, divided[0])
    else:
        students = gpus if work.cached else max(1, gpus // 2)
        apart = work.with_(student_ranks=students, replicas=1, ranks_per_replica=max(1, gpus - students), replicate=1)
    return {**found, "disaggregated_fused": apart}


def _within(work: Workload, mode: str, gpus: int | None) -> str | None:
    """Why a mode cannot be had with the GPUs there are, or None."""
    needed = cost_of(work, mode, 1.0).gpus
    if gpus is not None and needed > gpus:
        return f"it takes {needed} GPUs at least, and there are {gpus}"
    return work.refused if mode == "disaggregated_fused" else None


def _mode_plan(work: Workload, mode: str, with_knobs: bool, gpus: int | None) -> ModePlan:
    ranks = roles_of(work, mode)
    timing = timing_of(work, mode)
    beyond = _within(work, mode, gpus)
    fitting = beyond is None and fits(work, mode)
    return ModePlan(
        mode=mode,
        work=work,
        fits=fitting,
        ranks=ranks,
        usable={role: usable(work, role) for role in ranks},
        timing=timing,
        max_micro_batch_tokens=frontier(work, mode),
        max_teacher_parameters=largest_teacher(work, mode),
        why_not=None if fitting else beyond or why_not(work, mode),
        knobs=knobs(work, mode) if with_knobs else [],
    )


def figures(plan: Plan) -> Iterator[tuple[str, Term]]:
    """Every figure of the plan under `mode / rank / phase / name`, each term once per kind of rank."""
    for mode, one in plan.modes.items():
        for role, memory in one.ranks.items():
            seen: set[Term] = set()
            for phase in memory.phases:
                for part in phase.terms:
                    key = (part.name, part.value)
                    if key not in seen:
                        seen.add(key)
                        yield f"{mode} / {role} / {phase.name} / {part.name}", part
            yield f"{mode} / {role} / usable memory", one.usable[role]
        yield f"{mode} / teacher micro-batch", one.timing.teacher
        yield f"{mode} / student micro-batch", one.timing.student
        for part in one.timing.parts:
            slowest = " (the bottleneck)" if part.value == min(one.timing.rates.values()) else ""
            yield f"{mode} / bottleneck / tokens per second that the {part.name} allows{slowest}", part
        for part in one.timing.writing.figures if one.timing.writing else ():
            yield f"{mode} / writing / {part.name}", part
    yield from figures_of(plan.alternatives)
    yield "teacher FLOPs a token", teacher_flops(plan.work)
    yield "student FLOPs a token", student_flops(plan.work)
    for name, one in vars(plan.traffic).items():
        yield f"traffic / {name.replace('_', ' ')}", one


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, under the names of the contract."""
    work = plan.work
    return {
        "teacher": _model(work, "teacher"),
        "student": _model(work, "student"),
        "hardware": {
            "gpu": work.cluster.student_gpu.name,
            "teacher_gpu": work.cluster.teacher_gpu.name,
            "gpus_per_node": work.cluster.gpus_per_node,
            "nic_gbps": work.cluster.nic_gb_per_s * 8,
            "gpu_hour_price": work.cluster.student_price,
            "teacher_gpu_hour_price": work.cluster.teacher_price,
        },
        "micro_batch_tokens": work.micro_batch_tokens,
        "modes": {mode: _mode(one) for mode, one in plan.modes.items()},
        "alternatives": {one.name: _alternative(one) for one in plan.alternatives},
        "recommendation": vars(plan.verdict),
        "teacher_to_student_ratio": plan.ratio,
        "ring_depth": plan.ring_depth,
        "splits": [vars(split) for split in plan.splits],
        "assumptions": {name: vars(one) for name, one in CONSTANTS.items()},
        "calibrated_from": work.efficiency.calibrated_from,
        "error_bands": ERROR_BANDS,
        "not_modelled": NOT_MODELLED,
    }


def _model(work: Workload, side: str) -> dict[str, Any]:
    shape = getattr(work, side)
    counted = getattr(work, f"{side}_parameters")
    return {
        "model": shape.name,
        "source": shape.source,
        "parameters": counted.total,
        "active_parameters": counted.active,
        "hidden_size": shape.hidden,
        "vocabulary_size": shape.vocabulary,
        "layers": len(shape.layers),
    }


def _mode(one: ModePlan) -> dict[str, Any]:
    work, flow = one.work, traffic(one.work)
    apart = one.mode == "disaggregated_fused"
    figures = {
        "fits": one.fits,
        "gpus": one.gpus,
        "ranks": {role: _rank(memory, one.usable[role], _count(work, role)) for role, memory in one.ranks.items()},
        "traffic": {
            "hidden_states_bytes_per_token": flow.hidden_states.value if apart else 0,
            "logits_bytes_per_token": flow.logits.value,
            "top_k_bytes_per_token": flow.top_k.value,
            "request_bytes_per_token": flow.request.value if apart else 0,
            "hidden_states_bytes_per_step": flow.hidden_states.value
            * work.rows
            * work.accumulation
            * work.student_ranks
            if apart
            else 0,
            "fsdp_bytes_per_micro_batch": flow.fsdp.value,
            "replicas_all_reduce_bytes_per_micro_batch": flow.replicas.value,
            "teacher_gather_bytes_per_micro_batch": 0 if apart else flow.colocated_teacher.value,
            "vocabulary_parallel_bytes_per_micro_batch": flow.vocabulary_parallel.value,
        },
        "tokens_per_second": one.timing.tokens_per_second,
        "step_seconds": work.step_tokens / one.timing.tokens_per_second,
        "teacher_micro_batch_seconds": one.timing.teacher.value,
        "student_micro_batch_seconds": one.timing.student.value,
        "rates": one.timing.rates,
        "bottleneck": one.timing.bottleneck,
        "stall_share": one.timing.stall_share,
        "idle_share": one.timing.idle_share,
        "gpu_hours_per_million_tokens": one.cost.gpu_hours(1e6),
        "max_micro_batch_tokens": one.max_micro_batch_tokens,
        "max_teacher_parameters": None
        if one.max_teacher_parameters == float("inf")
        else round(one.max_teacher_parameters),
        "what_moves_it": [
            {"change": knob.change, "max_micro_batch_tokens": knob.max_micro_batch_tokens} for knob in one.knobs
        ],
        "why_not": one.why_not,
    }
    if (times := one.timing.writing) is not None:
        figures["writing"] = {
            "steps_per_window": times.steps,
            "window_seconds": times.window.value,
            "writing_seconds": times.written.value,
            "weights_seconds": times.weights.value,
            "weights_bytes_per_rank": times.weights_bytes.value,
            "tokens_written_per_second": times.tokens / times.window.value,
            "share": times.share,
            "lag_saves_seconds": times.lag_saves,
        }
    if one.cost.per_hour is not None:
        figures["cost_per_hour"] = one.cost.per_hour
        figures["cost_per_million_tokens"] = one.cost.money(1e6)
    return figures


def _alternative(one: Alternative) -> dict[str, Any]:
    plain = {
        "run_can": one.runs,
        "how": one.how,
        "fits": one.fits,
        "why_not": one.why_not,
        "gpus": one.cost.gpus,
        "ranks": {
            role: {
                "peak_bytes": round(memory.peak_bytes),
                "usable_bytes": round(one.usable[role].value),
                "binding_phase": memory.binding.name,
            }
            for role, memory in one.ranks.items()
        },
        "tokens_per_second": one.tokens_per_second,
        "gpu_hours_per_million_tokens": one.cost.gpu_hours(1e6),
        "figures": {part.name: part.value for part in one.figures},
        "notes": one.notes,
    }
    if one.cost.per_hour is not None:
        plain["cost_per_hour"] = one.cost.per_hour
        plain["cost_per_million_tokens"] = one.cost.money(1e6)
    return plain


def _count(work: Workload, role: str) -> int:
    return work.teacher_ranks if role == "teacher" else work.student_ranks


def _rank(memory: RankMemory, allowed: Term, count: int) -> dict[str, Any]:
    return {
        "count": count,
        "peak_bytes": round(memory.peak_bytes),
        "usable_bytes": round(allowed.value),
        "binding_phase": memory.binding.name,
        "phases": {phase.name: round(phase.bytes) for phase in memory.phases},
        "components": {one.name: round(one.value) for one in memory.binding.terms},
    }
