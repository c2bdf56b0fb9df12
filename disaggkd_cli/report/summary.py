"""The head of the page: a card a run, what differs between runs, and how far their losses lie apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

from disaggkd_cli.page import table
from disaggkd_cli.report.memory import peaks_by_role
from disaggkd_cli.report.read import Run
from disaggkd_cli.training.stage_record import read_stage_records
from disaggkd_cli.units import format_bytes, format_seconds

_SILENT_SECONDS = 120.0
"""A run that says it is running but has written nothing for so long may be dead: the card says so."""


def cards(runs: Sequence[Run]) -> str:
    """Return one card a run."""
    return f'<section class="modes">{"".join(_card(run) for run in runs)}</section>'


def state_of(run: Run) -> tuple[str, str, str]:
    """Return (state, class, remark): how a run stands, in words."""
    if run.status is None:
        return "not started yet", "", ""
    state, reason = run.status.state, run.status.reason
    if state == "running":
        if run.age_seconds is not None and run.age_seconds > _SILENT_SECONDS:
            return "running?", "no", f"nothing was written for {format_seconds(run.age_seconds)}"
        return "running", "", _time_left(run)
    if state == "finished":
        return "finished", "yes", ""
    resumable = " Go on with --resume auto." if run.status.resumable else ""
    return state, "no", f"{reason}.{resumable}"


def _time_left(run: Run) -> str:
    seconds = run.median("step_seconds")
    if seconds is None or run.planned_steps is None:
        return ""
    return f"about {format_seconds(seconds * (run.planned_steps - len(run.steps)))} of training left"


def _card(run: Run) -> str:
    state, mood, remark = state_of(run)
    done = int(run.steps[-1]["step"]) if run.steps else 0
    planned = run.planned_steps
    share = min(1.0, done / planned) if planned else 0.0
    items = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in _figures(run) if value is not None)
    return (
        f'<article class="card run" style="border-top-color:{run.colour}"><h3>{escape(run.name)}</h3>'
        f"<small>{escape(run.kind)}{_ranks(run)}</small>"
        f'<p class="big {mood}">{state}</p>'
        f'<div class="progress"><b style="width:{100 * share:.1f}%;background:{run.colour}"></b></div>'
        f"<small>step {done:,}{f' of {planned:,}' if planned else ''}{'; ' if remark else ''}{escape(remark)}</small>"
        f"<dl>{items}</dl></article>"
    )


def _ranks(run: Run) -> str:
    if run.config is None:
        return ""
    students, teachers = run.config.student.ranks, run.config.teacher_ranks
    return f"; {students} + {teachers} ranks" if teachers else f"; {students} ranks"


def _figures(run: Run) -> list[tuple[str, str | None]]:
    return [
        ("loss", _from_to(run.series("loss"), "{:.4f}")),
        ("held-out LM loss", _from_to(run.held_out("eval_lm_loss"), "{:.4f}")),
        ("the teacher's own", _last(run.held_out("eval_teacher_lm_loss"), "{:.4f}")),
        ("held-out KD", _from_to(run.held_out("eval_kd"), "{:.4f}")),
        ("held-out agreement", _from_to(run.held_out("eval_top1_agreement"), "{:.1%}")),
        ("tokens/s (median)", _form(run.median("tokens_per_second"), "{:,.0f}")),
        ("step (median)", _form(run.median("step_seconds"), "{:.3g} s")),
        ("teacher's forward" if run.colocated else "stall", _form(run.share("stall_seconds"), "{:.1%}")),
        ("teachers idle", _mean_idle(run)),
        ("stages idle", _idle_by_stage(run)),
        ("received a step", _bytes(run.median("received_bytes")) if not run.colocated else None),
        *_peaks(run),
        ("training so far", format_seconds(run.elapsed()[-1][0]) if run.steps else None),
    ]


def _peaks(run: Run) -> list[tuple[str, str | None]]:
    recorded = peaks_by_role(run).items()
    if recorded:
        return [(f"peak of a {role} rank", format_bytes(record.peak_bytes)) for role, record in recorded]
    peaks = [y for _, y in run.series("peak_memory_bytes")]
    return [("peak of a student rank", format_bytes(max(peaks)) if peaks else None)]


def _idle_by_stage(run: Run) -> str | None:
    """Of a pipeline teacher: how much of its time each stage had nothing to compute."""
    records = read_stage_records(run.directory.logs)
    return ", ".join(f"{one.rank.removeprefix('teacher ')} {one.idle_share:.0%}" for one in records) or None


def _mean_idle(run: Run) -> str | None:
    shares = run.idle_shares()
    return f"{sum(shares) / len(shares):.0%}" if shares else None


def _bytes(value: float | None) -> str | None:
    return None if value is None else format_bytes(value)


def _form(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _last(points: Sequence[tuple[float, float]], form: str) -> str | None:
    return form.format(points[-1][1]) if points else None


def _from_to(points: Sequence[tuple[float, float]], form: str) -> str | None:
    if not points:
        return None
    first, last = form.format(points[0][1]), form.format(points[-1][1])
    return last if len(points) == 1 else f"{first} → {last}"


def compared(runs: Sequence[Run]) -> str:
    """Return how far the losses of all runs lie from the first one's, and which config keys differ; empty for one."""
    if len(runs) < 2:
        return ""
    rows = [row for run in runs[1:] if (row := _apart(runs[0], run))]
    apart = ""
    if rows:
        head = ("", "steps in common", "largest difference of the loss", "median step", "speed")
        apart = f"<h2>Beside {escape(runs[0].name)}</h2>{table(head, rows)}"
    changed = differing_keys(runs)
    if not changed:
        return f"<section>{apart}</section>"
    body = [[f"<code>{escape(key)}</code>", *(escape(str(value)) for value in values)] for key, values in changed]
    differs = table(["config", *(escape(run.name) for run in runs)], body).replace(
        "<table>", '<table class="differs">', 1
    )
    return f"<section>{apart}<h2>What differs</h2>{differs}</section>"


def _apart(first: Run, other: Run) -> list[str] | None:
    losses = dict(first.series("loss"))
    common = [(losses[step], loss) for step, loss in other.series("loss") if step in losses]
    if not common:
        return None
    largest = max(abs(a - b) for a, b in common)
    times = first.median("step_seconds"), other.median("step_seconds")
    rates = first.median("tokens_per_second"), other.median("tokens_per_second")
    return [
        escape(other.name),
        f"{len(common):,}",
        f"{largest:.2g}",
        "-" if None in times else f"{times[0]:.3g} → {times[1]:.3g} s",
        "-" if None in rates or not rates[0] else f"{rates[1] / rates[0]:.2f} x",
    ]


def differing_keys(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return (dotted key, value a run) of the config keys in which runs differ, `run_dir` left out."""
    flat = [_flat(dataclasses.asdict(run.config)) if run.config else {} for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    found = []
    for key in keys:
        values = [one.get(key, "-") for one in flat]
        if key != "run_dir" and any(value != values[0] for value in values):
            found.append((key, values))
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
