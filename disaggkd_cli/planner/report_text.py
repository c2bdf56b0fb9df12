"""The plan as a page of text that a person grasps in half a minute: verdict, three modes, memory bars, links, what
moves what."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disaggkd_cli.planner.colours import COMPONENT_COLOURS, family
from disaggkd_cli.planner.constants import ERROR_BANDS, NOT_MODELLED
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.memory import Phase, RankMemory
from disaggkd_cli.planner.network import collective_rate, link_rate
from disaggkd_cli.planner.plan import ModePlan, Plan
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.units import format_bytes, format_seconds

TITLES = {
    "colocated_full": "colocated, full logits",
    "colocated_fused": "colocated, fused loss",
    "disaggregated_fused": "disaggregated, fused loss",
}
_BAR = 40


def print_plan(plan: Plan, console: Console, budget_tokens: float | None = None) -> None:
    """Print the whole page."""
    console.print(_heading(plan))
    console.print(_verdict(plan))
    console.print(_modes_table(plan))
    for name in _shown_modes(plan):
        console.print(_bars(plan.modes[name]))
    console.print(_links(plan))
    if plan.splits:
        console.print(_splits_table(plan))
    console.print(_moves(plan))
    console.print(_small_print(plan.work))


def per_second(rate: float) -> str:
    """A rate of tokens in a few digits."""
    return f"{rate:,.0f} tok/s" if rate < 1e4 else f"{rate / 1e3:,.1f} k tok/s"


def tokens_text(tokens: int) -> str:
    """A micro-batch in tokens; 0 means that none fits."""
    return f"{tokens:,}" if tokens else "none fits"


def teacher_text(parameters: float) -> str:
    """The size of the largest teacher that fits."""
    if parameters == float("inf"):
        return "any"
    return f"{parameters / 1e9:,.0f} B" if parameters else "none"


def _heading(plan: Plan) -> Text:
    work = plan.work
    line = Text()
    for side in ("teacher", "student"):
        shape, counted = getattr(work, side), getattr(work, f"{side}_parameters")
        active = "" if counted.active == counted.total else f", {counted.active / 1e9:.2f} B active"
        line.append(f"{side} ", style="dim")
        line.append(shape.name, style="bold")
        line.append(f" ({counted.total / 1e9:.2f} B{active})   ")
    cluster = work.cluster
    line.append(
        f"\non {_hardware(work)}, {cluster.gpus_per_node} a node, {cluster.nic_gb_per_s * 8:g} Gbit/s a GPU; ",
        style="dim",
    )
    line.append(
        f"micro-batch {work.micro_batch_tokens:,} tokens of {work.sequence:,}, "
        f"{'bfloat16' if work.student_bytes == 2 else 'float32'} "
        f"compute, {'full' if work.checkpointing else 'no'} activation checkpointing, {work.divergence}\n",
        style="dim",
    )
    return line


def _hardware(work: Workload) -> str:
    student, teacher = work.cluster.student_gpu.name, work.cluster.teacher_gpu.name
    return student if student == teacher else f"{student} (student) and {teacher} (teacher)"


def _verdict(plan: Plan) -> Panel:
    mode = plan.verdict.mode
    title = "nothing fits" if mode is None else f"take: {TITLES[mode]}"
    return Panel(
        Text(plan.verdict.reason), title=title, title_align="left", border_style="red" if mode is None else "green"
    )


def _modes_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in (
        "mode",
        "fits",
        "GPUs",
        "peak a rank (usable)",
        "fullest in",
        "speed",
        "bottleneck",
        "largest micro-batch",
    ):
        table.add_column(name, justify="right" if name in ("GPUs", "speed", "largest micro-batch") else "left")
    for name, one in plan.modes.items():
        peaks = "\n".join(f"{role} {_peak(memory, one.usable[role].value)}" for role, memory in one.ranks.items())
        phases = "\n".join(memory.binding.name for memory in one.ranks.values())
        table.add_row(
            Text(TITLES[name], style="bold" if name == plan.verdict.mode else ""),
            Text("yes", style="green") if one.fits else Text("no", style="red"),
            _gpus(one),
            peaks,
            phases,
            per_second(one.timing.tokens_per_second) if one.fits else "-",
            one.timing.bottleneck if one.fits else "-",
            tokens_text(one.max_micro_batch_tokens),
        )
    return table


def _gpus(one: ModePlan) -> str:
    if one.mode != "disaggregated_fused":
        return str(one.gpus)
    return f"{one.work.student_ranks} + {one.work.teacher_ranks}"


def _peak(memory: RankMemory, allowed: float) -> str:
    return f"{memory.peak_bytes / 2**30:.1f} ({allowed / 2**30:.1f}) GiB"


def _shown_modes(plan: Plan) -> list[str]:
    recommended = plan.verdict.mode or "disaggregated_fused"
    return [recommended]


def _bars(one: ModePlan) -> Group:
    """One bar a phase, scaled to what is usable (or to the peak, where that is more)."""
    lines: list[Text] = [Text(f"\nmemory of {TITLES[one.mode]}, by phase", style="dim")]
    used: list[str] = []
    for role, memory in one.ranks.items():
        allowed = one.usable[role].value
        scale = max(allowed, memory.peak_bytes)
        for phase in memory.phases:
            lines.append(_bar(role, phase, scale, allowed, phase is memory.binding))
            used += [family(part.name) for part in phase.terms]
    legend = Text("  ")
    for name in dict.fromkeys(used):
        legend.append("█ ", style=COMPONENT_COLOURS[name])
        legend.append(f"{name}  ", style="dim")
    return Group(*lines, legend)


def _bar(role: str, phase: Phase, scale: float, allowed: float, binding: bool) -> Text:
    line = Text(f"  {role:<9} {phase.name:<21} ")
    filled, drawn = 0.0, 0
    sums: dict[str, float] = {}
    for part in phase.terms:
        sums[family(part.name)] = sums.get(family(part.name), 0.0) + part.value
    for name, value in sums.items():
        filled += value
        width = round(filled / scale * _BAR) - drawn
        line.append("█" * width, style=COMPONENT_COLOURS[name])
        drawn += width
    limit = round(allowed / scale * _BAR)
    line.append("·" * max(limit - drawn, 0), style="dim")
    line.append(" " * (_BAR - max(limit, drawn)))
    style = "bold" + (" red" if phase.bytes > allowed else "") if binding else ("red" if phase.bytes > allowed else "")
    line.append(f" {phase.bytes / 2**30:6.1f} GiB", style=style)
    line.append("  fullest" if binding else "", style="bold")
    return line


def _links(plan: Plan) -> Text:
    work, flow = plan.work, plan.traffic
    rate = plan.modes["disaggregated_fused"].timing.tokens_per_second
    bytes_per_token = flow.hidden_states.value
    text = Text("\nlinks  ", style="dim")
    text.append(f"hidden states {bytes_per_token:,.0f} B a token", style="bold")
    text.append(f" (logits would be {flow.logits.value:,.0f}, top-64 {flow.top_k.value:,.0f} and not exact); at ")
    text.append(f"{per_second(rate)} {bytes_per_token * rate * work.supervised / 1e9:,.2f} GB/s in all, ")
    text.append(
        f"{bytes_per_token * rate * work.supervised / 1e9 / work.student_ranks:,.3f} of "
        f"{link_rate(work):,.1f} GB/s a student rank\n"
    )
    text.append(f"       FSDP moves {format_bytes(flow.fsdp.value)} a rank and micro-batch at ")
    text.append(f"{collective_rate(work.cluster, work.shard_ranks, work.cluster.student_gpu):,.0f} GB/s")
    text.append(f"; a colocated teacher would add {format_bytes(flow.colocated_teacher.value)}\n")
    text.append(
        f"       {plan.ratio:.2f} teacher GPUs keep one student GPU busy; ring depth {plan.ring_depth} is enough\n"
    )
    return text


def _splits_table(plan: Plan) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="dim", title=f"splits of {plan.gpus} GPUs", title_justify="left"
    )
    for name in ("student", "teachers", "speed", "bottleneck", "lost to rounding"):
        table.add_column(name, justify="right")
    for split in plan.splits:
        table.add_row(
            str(split.student_ranks),
            f"{split.replicas} x {split.ranks_per_replica}",
            per_second(split.tokens_per_second),
            split.bottleneck,
            f"{split.rounding_loss:.0%}",
        )
    return table


def _moves(plan: Plan) -> Text:
    text = Text()
    for name, one in plan.modes.items():
        if one.why_not:
            text.append(f"{TITLES[name]}: ", style="bold")
            text.append(f"{one.why_not}\n")
    best = plan.modes[plan.verdict.mode or "disaggregated_fused"]
    largest = ", ".join(
        f"{teacher_text(one.max_teacher_parameters)} ({TITLES[name]})" for name, one in plan.modes.items()
    )
    text.append("largest teacher, layers as wide as these: ", style="dim")
    text.append(largest + "\n")
    if best.knobs:
        text.append("largest micro-batch, ", style="dim")
        text.append(f"now {tokens_text(best.max_micro_batch_tokens)}: ", style="dim")
        text.append(
            ", ".join(f"{knob.change} -> {tokens_text(knob.max_micro_batch_tokens)}" for knob in best.knobs[:4]) + "\n"
        )
    text.append("a billion tokens: ", style="dim")
    text.append(cost_text(best))
    return text


def cost_text(one: ModePlan) -> str:
    """What a billion tokens take: time, GPU-hours, and money where prices are known."""
    cost, cluster = one.cost, one.work.cluster
    text = f"{format_seconds(cost.hours(1e9) * 3600)}, {cost.gpu_hours(1e9):,.0f} GPU-hours"
    money = cost.money(1e9)
    if money is None:
        return text
    prices = f"{cluster.student_price:g} a GPU-hour"
    if cost.teacher_gpus and cluster.teacher_price != cluster.student_price:
        prices = f"{cluster.student_price:g} (student) and {cluster.teacher_price:g} (teacher) a GPU-hour"
    source = f"; {cluster.price_source}" if cluster.price_source else ""
    return f"{text}, {money:,.0f} at {prices}{source}"


def _small_print(work: Workload) -> Text:
    text = Text("\n", style="dim")
    text.append(times_text(work) + "\n")
    text.append("error bands: " + "; ".join(f"{name} {band}" for name, band in ERROR_BANDS.items()) + "\n")
    text.append(f"not modelled: {len(NOT_MODELLED)} things, see --json or --html; any figure: --explain TERM")
    return text


def times_text(work: Workload) -> str:
    """What the times rest on."""
    if work.efficiency.calibrated_from:
        factors = f"{work.efficiency.teacher:.2f} (teacher), {work.efficiency.student:.2f} (student)"
        return f"times: closed form times {factors}, fitted to {work.efficiency.calibrated_from}"
    gpus = {gpu.name: gpu for gpu in (work.cluster.student_gpu, work.cluster.teacher_gpu)}
    assumed = [name for name, gpu in gpus.items() if not KERNELS.of(gpu.architecture).fitted]
    text = "times: fitted to published runs"
    if assumed:
        text += f"; none on {' and '.join(assumed)}, so as on Hopper"
    return text + "; --calibrate RUN_DIR fits them to a run of yours"
