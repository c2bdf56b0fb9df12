"""Loss, divergence, agreement, learning rate and speed against steps, all runs in one chart each."""

from __future__ import annotations

from collections.abc import Sequence

from disaggkd_cli.page import legend
from disaggkd_cli.page.charts import Point, Series, line_chart, number, percent, smoothed
from disaggkd_cli.report.read import Run

_FAR = 5.0
"""How many times the highest later perplexity the first one may be and still be drawn."""
_SMOOTH_FROM = 80
"""Curves of so many steps are shown as a running mean over the pale curve itself."""


def curves(runs: Sequence[Run]) -> str:
    """Return the section of curves."""
    charts = [
        line_chart("Training loss", _training(runs, "loss")),
        line_chart(
            "Training loss against time",
            [_series(run, [(at, line["loss"]) for at, line in run.elapsed()]) for run in runs],
            x_label="seconds",
            note="Seconds of optimizer steps; evaluations and checkpoints are not counted.",
        ),
        line_chart(
            "KD divergence",
            [*_training(runs, "kd"), *_evaluated(runs, "eval_kd")],
            note="Lines: training. Dots: held-out text.",
        ),
        line_chart(
            "Top-1 agreement with the teacher",
            [*_training(runs, "top1_agreement"), *_evaluated(runs, "eval_top1_agreement")],
            form=percent,
            note="Lines: training. Dots: held-out text.",
        ),
        line_chart(
            "Held-out language-model loss",
            [*_evaluated(runs, "eval_lm_loss", dashed=False), *_evaluated(runs, "eval_teacher_lm_loss")],
            note="Lines: the student. Dashed: the teacher's own loss on the same text.",
        ),
        _perplexity(runs),
        line_chart("Learning rate", [_series(run, run.series("learning_rate")) for run in runs]),
        line_chart("Gradient norm", _training(runs, "grad_norm")),
        line_chart("Tokens a second", _training(runs, "tokens_per_second")),
    ]
    if any(run.series("router_aux") for run in runs):
        charts.append(line_chart("Load-balancing loss of the routers", _training(runs, "router_aux")))
    if any(run.series("hidden") for run in runs):
        series = [*_training(runs, "hidden"), *_evaluated(runs, "eval_hidden")]
        charts.append(line_chart("Loss of the hidden states", series, note="Lines: training. Dots: held-out text."))
    names = legend((run.name, run.colour) for run in runs) if len(runs) > 1 else ""
    return f'<section><h2>Learning</h2>{names}<div class="charts">{"".join(charts)}</div></section>'


def _perplexity(runs: Sequence[Run]) -> str:
    """Draw perplexities, but for what an untrained student begins with, which would flatten all others."""
    series, left_out = [], []
    for run in runs:
        points = run.held_out("eval_perplexity")
        if len(points) > 2 and points[0][1] > _FAR * max(y for _, y in points[1:]):
            left_out.append(f"{run.name} {number(points[0][1])} after step {points[0][0]:.0f}")
            points = points[1:]
        series.append(Series(run.name, run.colour, points, dots=True))
    teachers = _evaluated(runs, "eval_teacher_perplexity")
    note = "Lines: the student. Dashed: the teacher's own on the same text."
    if left_out:
        note += f" Too high to be drawn: {'; '.join(left_out)}."
    return line_chart("Held-out perplexity", [*series, *teachers], note=note)


def _training(runs: Sequence[Run], name: str) -> list[Series]:
    found = []
    for run in runs:
        points = run.series(name)
        if len(points) < _SMOOTH_FROM:
            found.append(_series(run, points))
            continue
        found.append(Series(run.name, run.colour, points, faint=True))
        found.append(_series(run, smoothed(points, len(points) // 40 + 3)))
    return found


def _evaluated(runs: Sequence[Run], name: str, dashed: bool = True) -> list[Series]:
    return [Series(run.name, run.colour, run.held_out(name), dots=True, dashed=dashed) for run in runs]


def _series(run: Run, points: Sequence[Point]) -> Series:
    return Series(run.name, run.colour, points)
