"""Writing as modes of `bench step`: the same on-policy run with weights of this window and of the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.proportion import Proportion

ON_POLICY_MODES = ("on_policy_lag_0", "on_policy_lag_1")
PARTS = ("writing", "weights", "judging", "training")
"""Where a step's time goes: the student writes; its weights are gathered for that; it waits for hidden states (or a
colocated teacher computes them); and everything else."""


def on_policy_overrides(config: Config, mode: str) -> list[str]:
    """Return the overrides that give `config` the lag of one of `ON_POLICY_MODES`.

    Raises:
        UserError: its student writes nothing.
    """
    if not student_writes(config):
        raise UserError("--on-policy: the student of this config writes nothing; set on_policy.fraction above 0")
    return [f"on_policy.lag={mode.removeprefix('on_policy_lag_')}"]


def written_sequences(config: Config, steps: int) -> list[int]:
    """Return how many sequences of each of the first `steps` steps the student writes; none where it does not."""
    if not student_writes(config):
        return []
    size, share = config.global_batch_sequences, Proportion.of(config.on_policy.fraction)
    ends = [share.before(step * size) for step in range(steps + 1)]
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def writing_figures(lines: Sequence[Mapping[str, Any]], written: Sequence[int]) -> dict[str, Any]:
    """Return tokens written a second and the share of each of `PARTS`, of some steps of one run.

    Args:
        lines: of the steps' metrics.
        written: sequences that the student wrote, by step of the run, from 0.
    """
    seconds = sum(line["step_seconds"] for line in lines)
    tokens = sum(line.get("completion_tokens_mean", 0.0) * written[line["step"] - 1] for line in lines)
    spent = {
        "writing": sum(line["generation_seconds"] for line in lines),
        "weights": sum(line["weights_seconds"] for line in lines),
        "judging": sum(line["stall_seconds"] for line in lines),
    }
    shares = {part: spent[part] / seconds for part in spent}
    return {
        "written_tokens_per_second": tokens / seconds,
        "tokens_per_second_while_writing": tokens / spent["writing"] if spent["writing"] else 0.0,
        "shares": {**shares, "training": 1 - sum(shares.values())},
    }


def format_writing(modes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines on where the time of on-policy steps goes; none where no mode writes."""
    here = {mode: one["writing"] for mode, one in modes.items() if one.get("writing")}
    if not here:
        return []
    lines = [f"{'writing:':20} {'trained/s':>9} {'written/s':>9} {'while writing':>13}  share of a step"]
    for mode, one in here.items():
        shares = ", ".join(f"{part} {one['shares'][part]:.0%}" for part in PARTS)
        lines.append(
            f"{mode:20} {modes[mode]['tokens_per_second']:>9,.0f} {one['written_tokens_per_second']:>9,.0f} "
            f"{one['tokens_per_second_while_writing']:>13,.0f}  {shares}"
        )
    lines.append("judging: the student waits for hidden states, or a colocated teacher computes them")
    return lines
