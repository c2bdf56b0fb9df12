"""The page of `disaggkd report`, from runs that were read."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape

from disaggkd_cli.page import render_page, table
from disaggkd_cli.report.beside_teacher import beside_teacher
from disaggkd_cli.report.curves import curves
from disaggkd_cli.report.memory import memory
from disaggkd_cli.report.on_policy import on_policy
from disaggkd_cli.report.read import Run
from disaggkd_cli.report.samples import samples
from disaggkd_cli.report.summary import cards, compared
from disaggkd_cli.report.timeline import timelines

_SOURCE_POSITION = re.compile(r"\[/\S+:\d+\]\s*")
_MOST_EVENTS = 60


def render(runs: Sequence[Run], first: str = "") -> str:
    """Return the whole page; `first` is a section that stands before all others."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [
        f'<h1>{escape(title)}</h1><p class="facts">disaggkd report, written {when}</p>',
        first,
        cards(runs),
        beside_teacher(runs),
        compared(runs),
        curves(runs),
        on_policy(runs),
        samples(runs),
        timelines(runs),
        memory(runs),
        events(runs),
        machines(runs),
    ]
    return render_page(f"{title} · disaggkd report", parts)


def events(runs: Sequence[Run]) -> str:
    """Return what happened to links and ranks, run by run."""
    parts = []
    for run in runs:
        heading = f'<h3 style="color:{run.colour}">{escape(run.name)}</h3>' if len(runs) > 1 else ""
        if not run.events:
            parts.append(f'{heading}<p class="facts">Nothing in the logs.</p>')
            continue
        kept = run.events[-_MOST_EVENTS:]
        rows = [[one.time.split()[1], escape(one.rank), _kind(one.kind), escape(_short(one.text))] for one in kept]
        shown = table(("time", "rank", "event", "in its words"), rows).replace("<table>", '<table class="text">', 1)
        left = len(run.events) - len(kept)
        more = f'<p class="facts">{left} earlier ones are in {escape(str(run.directory.logs))}.</p>' if left else ""
        joined = sum(one.kind == "joined" for one in run.events)
        lost = sum(one.kind == "lost" and one.rank.startswith("student") for one in run.events)
        counts = "" if run.colocated else f'<p class="facts">Links joined: {joined}; lost: {lost}.</p>'
        opened = " open" if lost or len(runs) == 1 else ""
        folded = f"<details{opened}><summary>{len(run.events)} events</summary>{shown}{more}</details>"
        parts.append(heading + counts + folded)
    return f"<section><h2>Links and ranks</h2>{''.join(parts)}</section>"


def machines(runs: Sequence[Run]) -> str:
    """Return where each run took place, and with which versions."""
    rows = []
    for run in runs:
        found = run.environment
        versions = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
        place = found.get("placement", {})
        rows.append([
            escape(run.name),
            escape(str(found.get("started", "-"))),
            escape(f"{place.get('device', '-')}, {found.get('cores', '-')} cores, {found.get('platform', '-')}"),
            escape(f"disaggkd {found.get('disaggkd', '-')}, {versions}"),
        ])  # fmt: skip
    shown = table(("run", "started", "machine", "versions"), rows).replace("<table>", '<table class="text">', 1)
    return f"<section><h2>Where</h2>{shown}</section>"


def _kind(kind: str) -> str:
    mood = {"joined": "yes", "resumed": "yes", "lost": "no", "refused": "no", "bad reply": "no"}.get(kind, "")
    return f'<span class="{mood}">{kind}</span>' if mood else kind


def _short(text: str, most: int = 220) -> str:
    """Return a line without gloo's own source positions, cut where it is very long."""
    text = " ".join(_SOURCE_POSITION.sub("", text).split())
    return text if len(text) <= most else f"{text[:most].rstrip()} …"
