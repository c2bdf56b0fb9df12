"""Where the time of each step went: stall against compute, how full the ring was, and when each teacher was linked."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from disaggkd_cli.page import legend
from disaggkd_cli.page.charts import LEFT, RIGHT, WIDTH, Series, columns_chart, figure, line_chart, percent
from disaggkd_cli.report.read import Run

_COMPUTE, _STALL, _TEACHER = "#4e79a7", "#e15759", "#b07aa1"
_MOST_TEACHERS, _CELLS = 16, 100
_ROW = 22


def timelines(runs: Sequence[Run]) -> str:
    """Return the section of timelines, two figures a run."""
    several = len(runs) > 1
    charts = "".join(_steps(run, several) + _ring(run, several) + _teachers(run, several) for run in runs)
    names = [("student computes", _COMPUTE)]
    if any(run.colocated for run in runs):
        names.append(("colocated: the teacher's forward on the same ranks", _TEACHER))
    if not all(run.colocated for run in runs):
        names.append(("stall: the student waits for hidden states", _STALL))
    return f'<section><h2>Where the time goes</h2>{legend(names)}<div class="charts">{charts}</div></section>'


def _titled(run: Run, title: str, several: bool) -> str:
    return f"{run.name}: {title}" if several else title[0].upper() + title[1:]


def _steps(run: Run, several: bool) -> str:
    columns = []
    for line in run.steps:
        stall = float(line.get("stall_seconds", 0.0))
        columns.append((float(line["step"]), (max(0.0, float(line.get("step_seconds", 0.0)) - stall), stall)))
    waiting = ("teacher's forward", _TEACHER) if run.colocated else ("stall", _STALL)
    share = run.share("stall_seconds")
    note = "" if share is None else f"{waiting[0].capitalize()}: {share:.1%} of the time after warm-up."
    return columns_chart(
        _titled(run, "seconds of a step", several),
        [("compute", _COMPUTE), waiting],
        columns,
        dot=run.colour if several else None,
        note=note,
    )


def _ring(run: Run, several: bool) -> str:
    if run.colocated:
        return ""
    depth = f" {run.config.transport.ring_depth}" if run.config else ""
    return line_chart(
        _titled(run, "ring fill", several),
        [Series(run.name, run.colour, run.series("ring_fill"))],
        dot=run.colour if several else None,
        form=percent,
        bounds=(0.0, 1.0),
        note=f"Share of the ring's{depth} slots that lay ready when the student took one. Near 0: teachers or links "
        "are late.",
    )


def _teachers(run: Run, several: bool) -> str:
    """Draw a row a teacher: dark where it was busy, pale where it idled, empty where it was not linked."""
    names = dict.fromkeys(name for line in run.steps for name in line.get("teachers") or {})
    if not names:
        return ""
    shown = list(names)[:_MOST_TEACHERS]
    height = _ROW * len(shown) + 30
    left = LEFT + 46
    count = min(_CELLS, len(run.steps))
    groups = [run.steps[len(run.steps) * i // count : len(run.steps) * (i + 1) // count] for i in range(count)]
    width = (WIDTH - RIGHT - left) / count
    parts = []
    for row, name in enumerate(shown):
        y = row * _ROW
        parts.append(f'<text x="{left - 6}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{WIDTH - RIGHT - left}" height="{_ROW - 6}" class="frame"/>')
        parts += [_cell(group, name, left + index * width, y, width) for index, group in enumerate(groups)]
    first, last = int(run.steps[0]["step"]), int(run.steps[-1]["step"])
    parts.append(f'<text x="{left}" y="{height - 8}">step {first:,}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{last:,}</text>')
    more = f" {len(names) - len(shown)} more are not shown." if len(names) > len(shown) else ""
    caption = (
        "Dark: busy. Pale: idle. Empty: no link. A teacher process started again is a row of its own once it links."
        + more
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="teachers">{"".join(parts)}</svg>'
    return figure(_titled(run, "teachers", several), svg, caption, run.colour if several else None)


def _cell(group: Sequence[dict[str, Any]], name: str, x: float, y: float, width: float) -> str:
    found = [one for line in group if (one := (line.get("teachers") or {}).get(name)) and one.get("linked")]
    if not found:
        return ""
    idle = sum(one.get("idle_share") or 0.0 for one in found) / len(found)
    steps = f"{int(group[0]['step']):,}-{int(group[-1]['step']):,}"
    return (
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{_TEACHER}" '
        f'shape-rendering="crispEdges" opacity="{0.15 + 0.85 * (1 - idle):.2f}">'
        f"<title>{escape(name)}, steps {steps}: idle {idle:.0%}</title></rect>"
    )
