"""What was written at evaluations: the newest texts open, earlier ones folded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from disaggkd_cli.page import table
from disaggkd_cli.report.read import Run
from disaggkd_cli.training.samples import Sample, read_samples


def samples(runs: Sequence[Run]) -> str:
    """Return the section; nothing where no run has written texts."""
    parts = []
    for run in runs:
        found = read_samples(run.directory.samples)
        if not found:
            continue
        if len(runs) > 1:
            parts.append(f'<h3 style="color:{run.colour}">{escape(run.name)}</h3>')
        newest = found[-1].step
        parts.append(_shown([one for one in found if one.step == newest]))
        if earlier := [one for one in found if one.step != newest]:
            parts.append(f"<details><summary>{len(earlier)} earlier texts</summary>{_shown(earlier)}</details>")
    return f"<section><h2>Samples</h2>{''.join(parts)}</section>" if parts else ""


def _shown(found: Sequence[Sample]) -> str:
    rows = [[str(one.step), escape(one.table), *map(_lines, (one.prompt, one.writer, one.text))] for one in found]
    columns = ("after step", "table", "prompt", "writer", "text")
    return table(columns, rows).replace("<table>", '<table class="text">', 1)


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
