"""The student beside its teacher on the same held-out text: before training, and at the last evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from disaggkd_cli.page import table
from disaggkd_cli.report.read import Run

_FIGURES = (
    ("held-out language-model loss, nats a token", "eval_lm_loss", "eval_teacher_lm_loss", "{:.4f}"),
    ("held-out perplexity", "eval_perplexity", "eval_teacher_perplexity", "{:,.1f}"),
    ("KD divergence from the teacher", "eval_kd", None, "{:.4f}"),
    ("same best token as the teacher", "eval_top1_agreement", None, "{:.1%}"),
)
"""What a row is called, the student's figure, the teacher's own (None: it is compared with itself), and its form."""


def beside_teacher(runs: Sequence[Run]) -> str:
    """Return the section; nothing where no run has evaluated."""
    parts = []
    for run in runs:
        if not (rows := _rows(run)):
            continue
        if len(runs) > 1:
            parts.append(f'<h3 style="color:{run.colour}">{escape(run.name)}</h3>')
        steps = [int(line["step"]) for line in run.evaluations]
        now = f"student after step {steps[-1]:,}"
        head = ("", "teacher", now) if len(steps) == 1 else ("", "teacher", f"student after step {steps[0]:,}", now)
        parts.append(table(head, rows))
    return f"<section><h2>Beside the teacher</h2>{''.join(parts)}</section>" if parts else ""


def _rows(run: Run) -> list[list[str]]:
    if not run.evaluations:
        return []
    shown = run.evaluations[:1] + run.evaluations[1:][-1:]
    rows = []
    for name, own, teachers, form in _FIGURES:
        values = [_value(line.get(own), form) for line in shown]
        if any(value != "-" for value in values):
            taught = "" if teachers is None else _value(shown[-1].get(teachers), form)
            rows.append([name, taught, *values])
    return rows


def _value(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else "-"
