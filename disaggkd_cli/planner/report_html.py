"""The plan as one self-contained page: inline CSS and SVG, no script, nothing loaded from anywhere."""

from __future__ import annotations

from html import escape

from disaggkd_cli.page import render_page
from disaggkd_cli.planner.colours import COMPONENT_COLOURS, family
from disaggkd_cli.planner.constants import CONSTANTS, ERROR_BANDS, NOT_MODELLED
from disaggkd_cli.planner.html_frontier import frontier_svg
from disaggkd_cli.planner.memory import Phase
from disaggkd_cli.planner.network import collective_rate, link_rate
from disaggkd_cli.planner.plan import ModePlan, Plan, figures
from disaggkd_cli.planner.report_text import (
    TITLES,
    alternative_cells,
    alternative_lines,
    cost_text,
    per_second,
    teacher_text,
    times_text,
    tokens_text,
    verdict_lines,
)
from disaggkd_cli.units import format_bytes


def render_html(plan: Plan) -> str:
    """Return the whole page."""
    work = plan.work
    title = f"{work.teacher.name} → {work.student.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(plan),
        _verdict(plan),
        f'<section class="modes">{"".join(_card(plan, one) for one in plan.modes.values())}</section>',
        _legend(plan),
        *(_memory(one) for one in plan.modes.values()),
        f"<section><h2>How far it goes</h2>{frontier_svg(plan)}{_knobs(plan)}</section>",
        _alternatives(plan),
        _traffic(plan),
        _splits(plan),
        _provenance(plan),
    ]
    return render_page(f"{title} · disaggkd plan", parts)


def _facts(plan: Plan) -> str:
    work, cluster = plan.work, plan.work.cluster
    sides = []
    for side in ("teacher", "student"):
        counted = getattr(work, f"{side}_parameters")
        active = "" if counted.active == counted.total else f", {counted.active / 1e9:.2f} B active"
        sides.append(f"{side} {counted.total / 1e9:.2f} B{active}")
    gpu = cluster.student_gpu.name
    where = gpu if gpu == cluster.teacher_gpu.name else f"{gpu} and {cluster.teacher_gpu.name} for teachers"
    return (
        f'<p class="facts">{"; ".join(sides)}. {escape(where)}, {cluster.gpus_per_node} a node, '
        f"{cluster.nic_gb_per_s * 8:g} Gbit/s a GPU. "
        f"Micro-batch {work.micro_batch_tokens:,} tokens of {work.sequence:,}, "
        f"{'full' if work.checkpointing else 'no'} activation "
        f"checkpointing, {escape(work.divergence.replace('_', ' '))}.</p>"
    )


def _verdict(plan: Plan) -> str:
    mode = plan.verdict.mode
    headline = "Nothing fits" if mode is None else f"Take: {TITLES[mode]}"
    kind = "bad" if mode is None else "good"
    lines = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in verdict_lines(plan))
    return f'<section class="verdict {kind}"><h2>{headline}</h2><dl>{lines}</dl></section>'


def _card(plan: Plan, one: ModePlan) -> str:
    chosen = " chosen" if one.mode == plan.verdict.mode else ""
    gpus = (
        f"{one.gpus} GPUs"
        if one.mode != "disaggregated_fused"
        else f"{one.work.student_ranks} + {one.work.teacher_ranks} GPUs"
    )
    speed = per_second(one.timing.tokens_per_second) if one.fits else "does not fit"
    lines = "".join(
        f"<li>{role}: {memory.peak_bytes / 2**30:.1f} of {one.usable[role].value / 2**30:.1f} GiB, fullest in "
        f"{memory.binding.name}</li>"
        for role, memory in one.ranks.items()
    )
    bottleneck = (
        f"<li>bottleneck: {escape(one.timing.bottleneck)}</li>" if one.fits else f"<li>{escape(one.why_not or '')}</li>"
    )
    return (
        f'<article class="card{chosen}"><h3>{TITLES[one.mode]}</h3>'
        f'<p class="big {"yes" if one.fits else "no"}">{speed}</p>'
        f"<ul><li>{gpus}</li>{lines}{bottleneck}<li>largest micro-batch (tokens): "
        f"{tokens_text(one.max_micro_batch_tokens)}</li>"
        f"<li>largest teacher: {teacher_text(one.max_teacher_parameters)}</li>"
        f"<li>a billion tokens: {escape(cost_text(one)) if one.fits else 'does not fit'}</li></ul></article>"
    )


def _legend(plan: Plan) -> str:
    names = {
        family(part.name)
        for one in plan.modes.values()
        for rank in one.ranks.values()
        for phase in rank.phases
        for part in phase.terms
    }
    items = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for name, colour in COMPONENT_COLOURS.items()
        if name in names
    )
    items += '<span><i class="limit"></i>usable</span>'
    return f'<section><h2>Memory of one rank, by phase</h2><p class="legend">{items}</p></section>'


def _memory(one: ModePlan) -> str:
    scale = max(max(rank.peak_bytes, one.usable[role].value) for role, rank in one.ranks.items())
    rows = []
    for role, rank in one.ranks.items():
        limit = one.usable[role].value / scale
        rows += [_bar(role, phase, scale, limit, phase is rank.binding) for phase in rank.phases]
    return f'<section class="bars"><h3>{TITLES[one.mode]}</h3>{"".join(rows)}</section>'


def _bar(role: str, phase: Phase, scale: float, limit: float, binding: bool) -> str:
    pieces = "".join(
        f'<b style="width:{100 * part.value / scale:.3f}%;background:{COMPONENT_COLOURS[family(part.name)]}" '
        f'title="{escape(part.name)}: {format_bytes(part.value)}"></b>'
        for part in sorted(phase.terms, key=lambda part: list(COMPONENT_COLOURS).index(family(part.name)))
        if part.value > 0
    )
    over = " over" if phase.bytes / scale > limit else ""
    fullest = " fullest" if binding else ""
    return (
        f'<div class="row{over}{fullest}"><span class="name">{role} · {phase.name}</span>'
        f'<span class="bar">{pieces}<em style="left:{100 * limit:.3f}%"></em></span>'
        f'<span class="value">{phase.bytes / 2**30:.1f} GiB</span></div>'
    )


def _knobs(plan: Plan) -> str:
    best = plan.modes[plan.verdict.mode or "disaggregated_fused"]
    if not best.knobs:
        return ""
    items = "".join(
        f"<li><code>{escape(knob.change)}</code> → {tokens_text(knob.max_micro_batch_tokens)}</li>"
        for knob in best.knobs
    )
    return (
        f"<p>{TITLES[best.mode]}: largest micro-batch now {tokens_text(best.max_micro_batch_tokens)} tokens. What "
        f"moves it:</p><ul>{items}</ul>"
    )


def _alternatives(plan: Plan) -> str:
    priced = any(one.cost.per_hour is not None for one in plan.alternatives)
    paid = "cost of a billion tokens" if priced else "GPU-hours of a billion tokens"
    names = ("", "GPUs", "fullest rank, GiB", "speed", paid, "run can")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    rows = "".join(
        f"<tr><td>{one.title}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in alternative_cells(one))}</tr>"
        for one in plan.alternatives
    )
    notes = "".join(
        f"<li><b>{one.title}</b>: {escape('; '.join(alternative_lines(one)))}</li>" for one in plan.alternatives
    )
    return f"<section><h2>Alternatives</h2><table>{head}{rows}</table><ul>{notes}</ul></section>"


def _traffic(plan: Plan) -> str:
    work, flow = plan.work, plan.traffic
    rate = plan.modes["disaggregated_fused"].timing.tokens_per_second * work.supervised
    per_rank = rate * flow.hidden_states.value / 1e9 / work.student_ranks
    teacher_loop = (
        "weights resident" if work.ranks_per_replica == 1 else f"{work.parallelism} over {work.ranks_per_replica} ranks"
    )
    return (
        "<section><h2>What travels</h2>"
        f'<div class="flow"><div class="box teacher"><b>{"recorded" if work.cached else work.replicas} × teacher</b>'
        f"{escape(work.teacher.name)}<small>{teacher_loop}</small></div>"
        f'<div class="arrow"><span>hidden states: <b>{flow.hidden_states.value:,.0f} B a token</b>, '
        f"{rate * flow.hidden_states.value / 1e9:,.2f} GB/s in all</span>"
        f"<i></i><span>requests: {flow.request.value:,.1f} B a token</span></div>"
        f'<div class="box student"><b>{work.student_ranks} × student</b>{escape(work.student.name)}'
        f"<small>FSDP moves {format_bytes(flow.fsdp.value)} "
        f"a micro-batch at {collective_rate(work.cluster, work.shard_ranks, work.cluster.student_gpu):,.0f} "
        "GB/s</small></div></div>"
        f"<p>Full logits would take {flow.logits.value:,.0f} B a token "
        f"({flow.logits.value / flow.hidden_states.value:,.0f} times as much); "
        f"the top 64 {flow.top_k.value:,.0f} B, but not exactly. A student rank receives {per_rank:,.3f} of "
        f"{link_rate(work):,.1f} GB/s. "
        f"Colocated, the teacher's own gathers would add {format_bytes(flow.colocated_teacher.value)} a "
        "micro-batch.</p>"
        f"<p>{plan.ratio:.2f} teacher GPUs keep one student GPU busy; a ring of {plan.ring_depth} slots is "
        "enough.</p></section>"
    )


def _splits(plan: Plan) -> str:
    if not plan.splits:
        return ""
    rows = "".join(
        f"<tr><td>{split.student_ranks}</td><td>{split.replicas} × {split.ranks_per_replica}</td>"
        f"<td>{escape(split.parallelism) if split.ranks_per_replica > 1 else ''}</td>"
        f"<td>{split.micro_batch_sequences:g} × {split.accumulation}</td>"
        f"<td>{'full' if split.checkpointing else 'none'}</td><td>{per_second(split.tokens_per_second)}</td>"
        f"<td>{escape(split.bottleneck)}</td><td>{split.rounding_loss:.0%}</td></tr>"
        for split in plan.splits
    )
    names = (
        "student",
        "teachers",
        "layout",
        "sequences × accumulation",
        "checkpointing",
        "speed",
        "bottleneck",
        "lost to rounding",
    )
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return f"<section><h2>{plan.gpus} GPUs, divided</h2><table>{head}{rows}</table></section>"


def _provenance(plan: Plan) -> str:
    bands = "".join(f"<li>{escape(name)}: {escape(band)}</li>" for name, band in ERROR_BANDS.items())
    missing = "".join(f"<li>{escape(text)}</li>" for text in NOT_MODELLED)
    constants = "".join(
        f"<li><code>{name}</code> = {one.value:g} {escape(one.unit)} ({one.kind}): {escape(one.source)}</li>"
        for name, one in CONSTANTS.items()
    )
    terms = "".join(
        f"<li><b>{escape(where)}</b><pre>{escape(one.explain())}</pre></li>" for where, one in figures(plan)
    )
    return (
        f"<section><h2>How far to trust it</h2><p>{escape(times_text(plan.work))}.</p>"
        f"<ul>{bands}</ul><details><summary>Not modelled</summary><ul>{missing}</ul></details>"
        f"<details><summary>Constants and their sources</summary><ul>{constants}</ul></details>"
        f'<details><summary>Every figure, with its formula</summary><ul class="terms">{terms}</ul></details></section>'
    )
