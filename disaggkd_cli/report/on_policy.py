"""What the student of an on-policy run wrote: divergence there and on given texts, lengths, entropy, time."""

from __future__ import annotations

from collections.abc import Sequence

from disaggkd_cli.page import legend
from disaggkd_cli.page.charts import Series, line_chart, percent
from disaggkd_cli.report.read import Run


def on_policy(runs: Sequence[Run]) -> str:
    """Return the section; nothing where no run's student has written."""
    writing = [run for run in runs if run.series("completion_tokens_mean") or run.series("generation_seconds")]
    if not writing:
        return ""

    def lines(name: str, *, dashed: bool = False) -> list[Series]:
        return [Series(run.name, run.colour, run.series(name), dashed=dashed) for run in writing]

    evaluated = [Series(run.name, run.colour, run.held_out("eval_on_policy_kd"), dots=True) for run in writing]
    charts = [
        line_chart(
            "KD divergence by whose words they are",
            [*lines("on_policy_kd"), *lines("data_kd", dashed=True), *evaluated],
            note="Lines: on what the student wrote. Dashed: on given texts. Dots: on its continuations of held-out "
            "prompts.",
        ),
        line_chart("Tokens of a completion", lines("completion_tokens_mean")),
        line_chart("Completions cut at max_new_tokens", lines("completion_cut_share"), form=percent, bounds=(0.0, 1.0)),
        line_chart(
            "Entropy of what was drawn from",
            lines("sampled_entropy"),
            note="Nats a token. Towards 0 the student has found texts that are cheap rather than good.",
        ),
        line_chart(
            "Seconds of a step that went into writing",
            [*lines("generation_seconds"), *lines("weights_seconds", dashed=True)],
            note="Dashed: gathering the weights for it. 0 where no window was due.",
        ),
    ]
    names = legend((run.name, run.colour) for run in writing) if len(runs) > 1 else ""
    return f'<section><h2>What the student writes</h2>{names}<div class="charts">{"".join(charts)}</div></section>'
