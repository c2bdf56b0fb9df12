"""What was written at evaluations: the newest texts open, earlier ones folded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
    """Return a card a prompt, with what each writer made of it."""
    cards: dict[tuple[int, str, str], list[Sample]] = {}
    for one in found:
        cards.setdefault((one.step, one.table, one.prompt), []).append(one)
    return "".join(_card(*place, written) for place, written in cards.items())


def _card(step: int, name: str, prompt: str, written: Sequence[Sample]) -> str:
    texts = "".join(f"<dt>{escape(one.writer)}</dt><dd>{_lines(one.text)}</dd>" for one in written)
    where = f"<small>after step {step:,} · {escape(name)}</small>"
    return f'<div class="card sample">{where}<p>{_lines(prompt)}</p><dl>{texts}</dl></div>'


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
