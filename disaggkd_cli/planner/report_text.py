"""The plan as a page of text that a person grasps in half a minute: verdict, three modes, memory bars, links, what
moves what. It reads well from 80 columns on."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disaggkd_cli.planner.alternatives import Alternative
from disaggkd_cli.planner.colours import COMPONENT_COLOURS, family
from disaggkd_cli.planner.constants import ERROR_BANDS, NOT_MODELLED
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.memory import Phase, RankMemory
from disaggkd_cli.planner.network import collective_rate, link_rate, on_one_node
from disaggkd_cli.planner.plan import ModePlan, Plan
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.planner.writing import WritingTimes
from disaggkd_cli.units import format_bytes, format_seconds

TITLES = {
    "colocated_full": "colocated, full logits",
    "colocated_fused": "colocated, fused loss",
    "disaggregated_fused": "disaggregated, fused loss",
}
_BESIDE_BAR = 54
"""Columns of a line of memory that are not its bar: role, phase, bytes, mark."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print the whole page."""
    print_verdict(plan, console)
    console.print(_bars(plan.modes[plan.verdict.mode or "disaggregated_fused"], console.width))
    if plan.splits:
        console.print(_splits_table(plan))
        columns = "micro-batch: sequences × accumulation; again: with activation checkpointing\n"
        console.print(Text(columns, style="dim"))
    console.print(_alternatives_table(plan))
    console.print(_alternatives_notes(plan))
    console.print(_notes(plan))


def print_verdict(plan: Plan, console: Console) -> None:
    """Print its first screen: what is planned, the verdict, the three modes side by side."""
    console.print(_heading(plan))
    console.print(_verdict(plan))
    console.print(_modes_table(plan))


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


def verdict_lines(plan: Plan) -> list[tuple[str, str]]:
    """The verdict in five lines that need no other knowledge: take, because, costs, limited by, to change."""
    verdict = plan.verdict
    if verdict.mode is None:
        return [("because", verdict.reason)]
    one = plan.modes[verdict.mode]
    lines = [
        ("take", verdict.take),
        ("because", verdict.reason),
        ("costs", f"{per_second(one.timing.tokens_per_second)}; a billion tokens: {cost_text(one)}"),
        ("limited by", verdict.limited_by),
    ]
    return [*lines, ("to change", verdict.change)] if verdict.change else lines


def _labelled(lines: list[tuple[str, str]]) -> Table:
    """Labels, and beside each its text, wrapped between words."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(text))
    return grid


def _heading(plan: Plan) -> Table:
    work, cluster = plan.work, plan.work.cluster
    lines = []
    for side in ("teacher", "student"):
        shape, counted = getattr(work, side), getattr(work, f"{side}_parameters")
        active = "" if counted.active == counted.total else f", {counted.active / 1e9:.2f} B active"
        lines.append((side, f"{shape.name} ({counted.total / 1e9:.2f} B{active})"))
    network = f"{cluster.nic_gb_per_s * 8:g} Gbit/s a GPU" if cluster.nic_gb_per_s else "no network"
    lines.append(("hardware", f"{_hardware(work)}, {cluster.gpus_per_node} a node, {network}"))
    batch = f"micro-batch {work.micro_batch_tokens:,} tokens in sequences of {work.sequence:,}"
    dtype = "bfloat16" if work.student_bytes == 2 else "float32"
    again = "full" if work.checkpointing else "no"
    loss = work.divergence.replace("_", " ")
    lines.append(("run", f"{batch}, {dtype} compute, {again} activation checkpointing, {loss}\n"))
    return _labelled(lines)


def _hardware(work: Workload) -> str:
    student, teacher = work.cluster.student_gpu.name, work.cluster.teacher_gpu.name
    return student if student == teacher else f"{student} (student) and {teacher} (teacher)"


def _verdict(plan: Plan) -> Panel:
    mode = plan.verdict.mode
    title = "nothing fits" if mode is None else f"take: {TITLES[mode]}"
    style = "red" if mode is None else "green"
    return Panel(_labelled(verdict_lines(plan)), title=title, title_align="left", border_style=style)


def _modes_table(plan: Plan) -> Table:
    """The three modes side by side, a figure a line: three columns fit where eight would not."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for name in plan.modes:
        where, loss = TITLES[name].split(", ")
        chosen = "bold green" if name == plan.verdict.mode else "bold"
        table.add_column(Text(f"{where},\n{loss}", style=chosen), justify="right", min_width=15)
    modes = list(plan.modes.values())
    fits = [Text("fits", style="green") if one.fits else Text("does not fit", style="red") for one in modes]
    table.add_row("", *fits)
    for label, cells in _figures(modes):
        table.add_row(Text(label, style="dim"), *cells)
    return table


def _figures(modes: list[ModePlan]) -> list[tuple[str, list[str]]]:
    def speed(one: ModePlan) -> str:
        return per_second(one.timing.tokens_per_second) if one.fits else "-"

    rows = [
        ("GPUs", [_gpus(one) for one in modes]),
        ("speed", [speed(one) for one in modes]),
        ("bottleneck", [one.timing.bottleneck if one.fits else "-" for one in modes]),
        ("idle teachers", [f"{one.timing.idle_share:.0%}" if _waits(one) else "-" for one in modes]),
    ]
    if any(one.cost.per_hour is not None for one in modes):
        money = [one.cost.money(1e9) if one.fits else None for one in modes]
        rows.append(("cost, 10⁹ tokens", [f"{value:,.0f}" if value is not None else "-" for value in money]))
    for role in dict.fromkeys(role for one in modes for role in one.ranks):
        held = [one.ranks.get(role) for one in modes]
        rows.append((f"{role} rank, GiB", [_peak(one, role) for one in modes]))
        rows.append(("  fullest in", [memory.binding.name if memory else "" for memory in held]))
    rows.append(("largest micro-batch", [tokens_text(one.max_micro_batch_tokens) for one in modes]))
    rows.append(("largest teacher", [teacher_text(one.max_teacher_parameters) for one in modes]))
    return rows


def _waits(one: ModePlan) -> bool:
    return one.fits and one.mode == "disaggregated_fused" and not one.work.cached


def _gpus(one: ModePlan) -> str:
    if one.mode != "disaggregated_fused":
        return str(one.gpus)
    return f"{one.work.student_ranks} + {one.work.teacher_ranks}"


def _peak(one: ModePlan, role: str) -> str:
    if role not in one.ranks:
        return ""
    return f"{one.ranks[role].peak_bytes / 2**30:.1f} of {one.usable[role].value / 2**30:.1f}"


def _bars(one: ModePlan, width: int) -> Group:
    """One bar a phase, scaled to what is usable (or to the peak, where that is more)."""
    lines: list[Text] = [Text(f"\nmemory of {TITLES[one.mode]}, by phase", style="dim")]
    used: list[str] = []
    for role, memory in one.ranks.items():
        lines += _bars_of_rank(role, memory, one.usable[role].value, max(16, min(60, width - _BESIDE_BAR)))
        used += [family(part.name) for phase in memory.phases for part in phase.terms]
    return Group(*lines, *_legend(list(dict.fromkeys(used)), width), Text())


def _legend(names: list[str], width: int) -> list[Text]:
    """Colours and their names, which stay whole at the end of a line."""
    lines = [Text("  ")]
    for name in names:
        if lines[-1].cell_len + len(name) + 2 > width:
            lines.append(Text("  "))
        lines[-1].append("█ ", style=COMPONENT_COLOURS[name])
        lines[-1].append(f"{name}  ", style="dim")
    return lines


def _bars_of_rank(role: str, memory: RankMemory, allowed: float, columns: int) -> list[Text]:
    scale = max(allowed, memory.peak_bytes)
    lines = []
    for index, phase in enumerate(memory.phases):
        line = Text(f"  {role if index == 0 else '':<9} {phase.name:<21} ")
        lines.append(_bar(line, phase, scale, allowed, columns, phase is memory.binding))
    return lines


def _bar(line: Text, phase: Phase, scale: float, allowed: float, columns: int, binding: bool) -> Text:
    filled, drawn = 0.0, 0
    sums: dict[str, float] = {}
    for part in phase.terms:
        sums[family(part.name)] = sums.get(family(part.name), 0.0) + part.value
    for name, value in sums.items():
        filled += value
        width = round(filled / scale * columns) - drawn
        line.append("█" * width, style=COMPONENT_COLOURS[name])
        drawn += width
    limit = round(allowed / scale * columns)
    line.append("·" * max(limit - drawn, 0), style="dim")
    line.append(" " * (columns - max(limit, drawn)))
    style = "bold" + (" red" if phase.bytes > allowed else "") if binding else ("red" if phase.bytes > allowed else "")
    line.append(f" {phase.bytes / 2**30:6.1f} GiB", style=style)
    line.append(" fullest" if binding else "", style="bold")
    return line


def _splits_table(plan: Plan) -> Table:
    priced = any(split.cost_per_hour for split in plan.splits)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.title, table.title_justify = f"the best splits of {plan.gpus:,} GPUs", "left"
    names = ("students + teachers", "micro-batch", "speed", *(["10⁹ tokens"] if priced else []), "limited by")
    for name in names:
        table.add_column(name, justify="left" if name == "limited by" else "right", no_wrap=name != "limited by")
    for split in plan.splits:
        layout = "" if split.ranks_per_replica == 1 else f" {split.parallelism}"
        again = " again" if split.checkpointing else ""
        cost = []
        if priced:
            value = (split.cost_per_hour or 0) * 1e9 / split.tokens_per_second / 3600
            cost = [f"{value:,.0f}"]
        table.add_row(
            f"{split.student_ranks} + {split.replicas} × {split.ranks_per_replica}{layout}",
            f"{split.micro_batch_sequences:g} × {split.accumulation}{again}",
            per_second(split.tokens_per_second),
            *cost,
            split.bottleneck,
        )
    return table


def _alternatives_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.title, table.title_justify = "\nalternatives", "left"
    priced = any(one.cost.per_hour is not None for one in plan.alternatives)
    for name in ("", "GPUs", "fullest, GiB", "speed", "10⁹ tokens" if priced else "GPUh, 10⁹", "run can"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in plan.alternatives:
        table.add_row(one.title, *alternative_cells(one))
    return table


def alternative_cells(one: Alternative) -> tuple[str, str, str, str, str]:
    """GPUs, memory of the fullest rank, speed, cost of a billion tokens (money where prices are known, else
    GPU-hours), and whether `run` can do it."""
    cost, role = one.cost, one.fullest
    gpus = f"{cost.student_gpus} + {cost.teacher_gpus}" if cost.teacher_gpus else str(cost.gpus)
    memory = f"{one.ranks[role].peak_bytes / 2**30:.1f} of {one.usable[role].value / 2**30:.1f}"
    money = cost.money(1e9)
    paid = f"{cost.gpu_hours(1e9) if money is None else money:,.0f}"
    speed, paid = (per_second(one.tokens_per_second), paid) if one.fits else ("does not fit", "-")
    return gpus, memory, speed, paid, "yes" if one.runs else "no"


def _alternatives_notes(plan: Plan) -> Table:
    lines = [(one.title, "; ".join(alternative_lines(one))) for one in plan.alternatives]
    return _labelled([("", ""), *lines, ("", "")])


def alternative_lines(one: Alternative) -> list[str]:
    """What is to be known of an alternative: what it is, how it is had, why it is not."""
    lines = [*one.notes, one.how]
    if one.why_not and one.why_not != one.how:
        lines.append(f"does not fit: {one.why_not}")
    return lines


def _notes(plan: Plan) -> Table:
    lines = [("links", _links_text(plan)), ("inside", _inside_text(plan)), ("", _balance_text(plan))]
    if (times := plan.modes[plan.verdict.mode or "disaggregated_fused"].timing.writing) is not None:
        lines.insert(0, ("writing", _writing_text(times)))
    for name, one in plan.modes.items():
        if one.why_not and name != plan.verdict.mode:
            lines.append((TITLES[name].split(", ")[0], f"{TITLES[name]}: {one.why_not}"))
    best = plan.modes[plan.verdict.mode or "disaggregated_fused"]
    if best.knobs:
        moves = [f"{knob.change} to {tokens_text(knob.max_micro_batch_tokens)}" for knob in best.knobs[:4]]
        lines.append(("more room", f"largest micro-batch: {', '.join(moves)}"))
    lines.append(("", ""))
    lines.append(("trust", times_text(plan.work)))
    lines.append(("bands", "; ".join(f"{name}: {band}" for name, band in ERROR_BANDS.items())))
    lines.append(("missing", f"{len(NOT_MODELLED)} things are not modelled, see --json or --html"))
    lines.append(("any figure", "--explain TERM gives formula, numbers and source"))
    return _labelled(lines)


def _writing_text(times: WritingTimes) -> str:
    saves = f"; its lag saves {format_seconds(times.lag_saves)}" if times.lag_saves > 0 else ""
    return (
        f"of a window of {times.steps} step{'s' if times.steps > 1 else ''} ({format_seconds(times.window.value)}) the "
        f"student writes for {format_seconds(times.written.value)} and gathers weights for "
        f"{format_seconds(times.weights.value)}, {times.share:.0%} of it{saves}; "
        f"{per_second(times.tokens / times.window.value)} are written, were all completions as long as they may be"
    )


def _links_text(plan: Plan) -> str:
    work, flow = plan.work, plan.traffic
    moved = flow.hidden_states.value * plan.modes["disaggregated_fused"].timing.tokens_per_second * work.supervised
    where = "inside the node" if on_one_node(work) else "over the network"
    return (
        f"hidden states take {flow.hidden_states.value:,.0f} B a token (logits {flow.logits.value:,.0f}; top-64 "
        f"{flow.top_k.value:,.0f}, not exact): {moved / 1e9:,.2f} GB/s in all, {moved / 1e9 / work.student_ranks:,.3f} "
        f"of {link_rate(work):,.1f} GB/s a student rank, {where}"
    )


def _inside_text(plan: Plan) -> str:
    work, flow = plan.work, plan.traffic
    rate = collective_rate(work.cluster, work.shard_ranks, work.cluster.student_gpu)
    copies = f", and {format_bytes(flow.replicas.value)} between its copies" if work.replicate > 1 else ""
    return (
        f"FSDP moves {format_bytes(flow.fsdp.value)} a student rank and micro-batch at {rate:,.0f} GB/s{copies}; a "
        f"colocated teacher would add {format_bytes(flow.colocated_teacher.value)}"
    )


def _balance_text(plan: Plan) -> str:
    if plan.work.cached:
        return "hidden states are read from a directory; no teacher runs"
    return f"{plan.ratio:.2f} teacher GPUs keep one student GPU busy; a ring of {plan.ring_depth} slots is enough"
