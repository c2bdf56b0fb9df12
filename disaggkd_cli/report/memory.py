"""Memory of each kind of rank as planned, by component, with what was measured; and other figures beside the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from disaggkd_cli.errors import UserError
from disaggkd_cli.page import legend, table
from disaggkd_cli.planner.colours import COMPONENT_COLOURS, family
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.measure import Compared, compare, read_run
from disaggkd_cli.planner.memory import RankMemory
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.report.read import Run
from disaggkd_cli.training.memory_record import MemoryRecord
from disaggkd_cli.units import format_bytes


def memory(runs: Sequence[Run]) -> str:
    """Return the section that sets runs beside their plans; a run that cannot be planned says why."""
    parts, families = [], {}
    for run in runs:
        parts.append(f'<h3 style="color:{run.colour}">{escape(run.name)}</h3>' if len(runs) > 1 else "")
        try:
            if run.config is None:
                raise UserError(run.config_problem)
            with _working_in(run.started_in):
                work = workload_of(run.config)
            ranks = roles_of(work, planned_mode(run))
        except UserError as error:
            parts.append(f'<p class="facts">No plan: {escape(str(error))}</p>')
            continue
        families |= {family(one.name): None for rank in ranks.values() for one in rank.binding.terms if one.value > 0}
        parts.append(_bars(run, ranks))
        parts.append(_beside(run, work))
    names = [(name, colour) for name, colour in COMPONENT_COLOURS.items() if name in families]
    bars = "".join(parts)
    marked = '<p class="legend"><span><i class="limit"></i>measured peak</span></p>' if "<em " in bars else ""
    return f"<section><h2>Memory, against the plan</h2>{legend(names)}{marked}{bars}</section>"


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    """Read relative paths as the run did, wherever the report is made."""
    here = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(here)


def planned_mode(run: Run) -> str:
    """Return the planner's name of a run's mode."""
    if not run.colocated:
        return "disaggregated_fused"
    return "colocated_fused" if run.config.loss.implementation == "fused" else "colocated_full"


def measured_peak(run: Run) -> tuple[float | None, str]:
    """Return a student rank's measured peak and what exactly was measured."""
    peaks = [y for _, y in run.series("peak_memory_bytes")]
    on_gpu = str(run.environment.get("placement", {}).get("device", "cpu")).startswith("cuda")
    return (max(peaks) if peaks else None), ("allocated on the GPU" if on_gpu else "the whole process")


def peaks_by_role(run: Run) -> dict[str, MemoryRecord]:
    """Return the record of the fullest rank of each role that left one; a colocated rank's role is `colocated`."""
    found: dict[str, MemoryRecord] = {}
    for record in run.memory:
        role = "colocated" if run.colocated else record.rank.split()[0]
        if role not in found or record.above_start > found[role].above_start:
            found[role] = record
    return found


def _bars(run: Run, ranks: dict[str, RankMemory]) -> str:
    records = peaks_by_role(run)
    peaks = {role: float(record.above_start) for role, record in records.items()}
    peak, what = measured_peak(run)
    student = "colocated" if run.colocated else "student"
    if peak is not None and student not in peaks:
        peaks[student] = peak
    scale = max(rank.peak_bytes for rank in ranks.values())
    scale = max([scale, *(size for size in peaks.values() if size <= 4 * scale)])
    rows = []
    for role, rank in ranks.items():
        mark = peaks.get(role)
        rows.append(_bar(f"{role} · {rank.binding.name}", rank, scale, mark if mark and mark <= scale else None))
    sentences = [_words(role, record) for role, record in records.items() if role in ranks]
    if peak is not None and student not in records:
        sentences.append(f"Measured on a {student} rank: {format_bytes(peak)} ({what}).")
    if any(not record.device.startswith("cuda") for record in records.values()):
        sentences.append(
            "On CPUs that is the whole process with loading and saving, less what it took when its libraries were "
            "imported; the plan counts the tensors of training."
        )
    elif what == "the whole process" and peak is not None:
        sentences.append(
            "On CPUs that counts Python, torch and the texts too, several hundred MiB, which the plan's tensors do not."
        )
    return f'<div class="bars">{"".join(rows)}<p class="facts">{" ".join(sentences)}</p></div>'


def _words(role: str, record: MemoryRecord) -> str:
    if record.device.startswith("cuda"):
        return f"Measured on the fullest {role} rank: {format_bytes(record.peak_bytes)} (allocated on the GPU)."
    return (
        f"Measured on the fullest {role} rank: {format_bytes(record.above_start)} "
        f"({format_bytes(record.peak_bytes)} with {format_bytes(record.start_bytes)} at its start)."
    )


def _bar(name: str, rank: RankMemory, scale: float, peak: float | None) -> str:
    order = list(COMPONENT_COLOURS)
    pieces = "".join(
        f'<b style="width:{100 * one.value / scale:.3f}%;background:{COMPONENT_COLOURS[family(one.name)]}" '
        f'title="{escape(one.name)}: {format_bytes(one.value)}"></b>'
        for one in sorted(rank.binding.terms, key=lambda one: order.index(family(one.name)))
        if one.value > 0
    )
    mark = "" if peak is None else f'<em style="left:{100 * peak / scale:.3f}%"></em>'
    return (
        f'<div class="row"><span class="name">{escape(name)}</span><span class="bar">{pieces}{mark}</span>'
        f'<span class="value">{format_bytes(rank.peak_bytes)}</span></div>'
    )


def _beside(run: Run, work: Workload) -> str:
    try:
        rows = compare(work, read_run(run.directory.root))
    except UserError as error:
        return f'<p class="facts">Not compared yet: {escape(str(error))}</p>'
    if measured_peak(run)[1] == "the whole process":
        rows = [one for one in rows if not one.name.startswith("peak")]  # stated beside the bars already
    note = ""
    if str(run.environment.get("placement", {}).get("device", "cpu")) == "cpu":
        # The catalogue knows GPUs: a predicted time says nothing about a run on CPUs.
        rows = [one for one in rows if one.unit == "bytes"]
        note = '<p class="facts">Times are not compared: the plan is for GPUs, and this run was on CPUs.</p>'
    if not rows:
        return note
    body = [[escape(one.name), _value(one, one.predicted), _value(one, one.measured), _error(one)] for one in rows]
    return table(("", "planned", "measured", "off by"), body) + note


def _value(one: Compared, value: float) -> str:
    return format_bytes(value) if one.unit == "bytes" else f"{value:,.4g} {one.unit}"


def _error(one: Compared) -> str:
    return "-" if one.error is None else f"{one.error:+.1%}"
