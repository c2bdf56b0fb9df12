"""`disaggkd bench step`: one pair, the same data and global batch, trained in all three modes in turns.

Every mode is a real `disaggkd run` on the same number of ranks. Rounds are interleaved (the order rotates), so that
what else the machine does falls on all modes alike; medians over the rounds are reported, with their spread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disaggkd_cli.bench.runs import MODES, Say, Watched, machine, mode_overrides, watch_run
from disaggkd_cli.config import Config, load
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.traffic import traffic
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.units import format_bytes

_WARM_UP = 0.25
"""Share of a run's first steps that count as warm-up."""

EQUAL_LOSS = 1e-5
"""Losses that lie no further apart than this count as the same."""


@dataclass(frozen=True)
class StepBenchOptions:
    """What `bench step` measures.

    Attributes:
        config, overrides: the pair; `train.steps` and what is saved and evaluated are set by the bench.
        steps: optimizer steps of each run, a quarter of them warm-up.
        repeats: rounds.
        modes: which of `MODES`.
        keep: a directory that keeps the runs; None deletes them.
        timeout: seconds that one run may take.
    """

    config: str
    overrides: Sequence[str] = ()
    steps: int = 20
    repeats: int = 3
    modes: Sequence[str] = MODES
    keep: str | None = None
    timeout: float = 900.0


@dataclass
class _Turns:
    """The rounds of one mode."""

    runs: list[Path] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)


def bench_step(options: StepBenchOptions, say: Say, html: str | None = None) -> dict[str, Any]:
    """Measure and return `{machine, modes: {name: {tokens_per_second, peak_bytes, stall_share, ...}}, claims, ...}`.

    Args:
        say: called with a line as each run ends.
        html: also write a page with the runs' curves overlaid.

    Raises:
        UserError: the config cannot be shared out among the ranks, or `html` cannot be written.
        RunError: a run failed.
    """
    config = load(options.config, options.overrides, running=True)
    extra = {mode: mode_overrides(config, mode) for mode in options.modes}
    with tempfile.TemporaryDirectory(prefix="disaggkd-bench-") as temporary:
        root = Path(options.keep or temporary)
        turns = {mode: _Turns() for mode in options.modes}
        for repeat in range(options.repeats):
            shift = repeat % len(options.modes)
            for mode in (*options.modes[shift:], *options.modes[:shift]):
                directory = root / f"{mode}_{repeat + 1}"
                turns[mode].watched.append(_run(options, extra[mode], config, directory))
                turns[mode].runs.append(directory)
                say(f"round {repeat + 1} of {options.repeats}: {mode} {_rate(directory):,.0f} tokens/s")
        result = {
            "machine": machine(),
            "config": options.config,
            "overrides": list(options.overrides),
            "ranks": config.student.ranks + config.teacher_ranks,
            "global_batch_sequences": config.global_batch_sequences,
            "sequence_length": config.data.sequence_length,
            "steps": options.steps,
            "repeats": options.repeats,
            "modes": {mode: _figures(load(turn.runs[0] / "config.yaml"), turn) for mode, turn in turns.items()},
        }
        result["claims"] = claims(result["modes"])
        if html is not None:
            _write_html(Path(html), result, [turn.runs[0] for turn in turns.values()])
    return result


def _run(options: StepBenchOptions, extra: Sequence[str], config: Config, directory: Path) -> Watched:
    held_out = max(1, config.global_batch_sequences)
    arguments = [
        options.config,
        *options.overrides,
        *extra,
        f"run_dir={directory}",
        f"train.steps={options.steps}",
        "train.eval_every=0",
        "train.save_every=0",
        f"data.eval_sequences={held_out}",
        "--restarts",
        "0",
    ]
    watched = watch_run(arguments, timeout=options.timeout)
    if watched.code != 0:
        raise RunError(f"`disaggkd run {' '.join(arguments)}` ended with exit code {watched.code}:\n{watched.output}")
    return watched


def _steps(directory: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(directory / "metrics.jsonl") if "loss" in line]


def _warm(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return lines[int(len(lines) * _WARM_UP) :]


def _rate(directory: Path) -> float:
    """Return tokens a second over all steps after warm-up, slow ones included."""
    lines = _warm(_steps(directory))
    tokens = sum(line["tokens_per_second"] * line["step_seconds"] for line in lines)
    return tokens / sum(line["step_seconds"] for line in lines)


def _share(directory: Path, name: str) -> float:
    lines = _warm(_steps(directory))
    return sum(line[name] for line in lines) / sum(line["step_seconds"] for line in lines)


def _figures(config: Config, turn: _Turns) -> dict[str, Any]:
    rates = [_rate(directory) for directory in turn.runs]
    colocated = config.mode == "colocated"
    flow = traffic(workload_of(config))
    last = [_steps(directory)[-1] for directory in turn.runs]
    return {
        "ranks": {"colocated" if colocated else "student": config.student.ranks}
        | ({} if colocated else {"teacher": config.teacher_ranks}),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_spread": [min(rates), max(rates)],
        "rounds": rates,
        "step_seconds": statistics.median(
            line["step_seconds"] for directory in turn.runs for line in _warm(_steps(directory))
        ),
        "peak_bytes": _peaks(colocated, turn, last),
        "stall_share": statistics.median(_share(directory, "stall_seconds") for directory in turn.runs),
        "stall_is": "the teacher's forward, gathers included" if colocated else "waiting for hidden states",
        "idle_share": None if colocated else statistics.median(_idle(line) for line in last),
        "received_bytes_per_step": statistics.median(line["received_bytes"] for line in _warm(_steps(turn.runs[0]))),
        "teacher_gather_bytes_per_step": round(flow.colocated_teacher.value * config.train.accumulation)
        if colocated
        else 0,
        "losses": [line["loss"] for line in _steps(turn.runs[0])],
    }


def _peaks(colocated: bool, turn: _Turns, last: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the highest resident memory of a rank by role; on GPUs the student's is what its allocator held."""
    watched = [one.resident_bytes for one in turn.watched]
    peaks = {role: max(one.get(role, 0) for one in watched) for role in watched[0]}
    peaks["student"] = max([int(line["peak_memory_bytes"]) for line in last])
    if colocated:
        return {"colocated": peaks["student"]}
    return peaks


def _idle(line: dict[str, Any]) -> float:
    shares = [one["idle_share"] for one in (line.get("teachers") or {}).values() if one["linked"]]
    return sum(shares) / len(shares) if shares else 0.0


def claims(modes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the measurements say of the claims that they can judge: `{claim, holds, figures}` each.

    A speed-up holds only when the slowest round of one mode beats the fastest of the other; `None` means that the
    rounds overlap, or that there was only one, so that nothing can be said.
    """
    found = []
    first = next(iter(modes))
    for mode in list(modes)[1:]:
        pairs = zip(modes[first]["losses"], modes[mode]["losses"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        found.append(
            {"claim": f"same loss: {mode} and {first}", "holds": apart <= EQUAL_LOSS, "figures": f"{apart:.2g} apart"}
        )
    orders = (("disaggregated_fused", "colocated_fused"), ("disaggregated_fused", "colocated_full"),
              ("colocated_fused", "colocated_full"))  # fmt: skip
    for fast, slow in orders:
        if fast in modes and slow in modes:
            found.append(_faster(fast, slow, modes))
    for lean, fat in orders:
        if lean in modes and fat in modes:
            sizes = [max(modes[one]["peak_bytes"].values()) for one in (lean, fat)]
            found.append(
                {
                    "claim": f"less memory in the fullest rank: {lean} than {fat}",
                    "holds": sizes[0] < sizes[1],
                    "figures": f"{format_bytes(sizes[0])} against {format_bytes(sizes[1])}",
                }
            )
    return found


def _faster(fast: str, slow: str, modes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    low, high = modes[fast]["tokens_per_second_spread"], modes[slow]["tokens_per_second_spread"]
    holds = True if low[0] > high[1] else False if low[1] < high[0] else None
    if min(len(modes[one]["rounds"]) for one in (fast, slow)) < 2:
        holds = None
    ratio = modes[fast]["tokens_per_second"] / modes[slow]["tokens_per_second"]
    return {"claim": f"faster: {fast} than {slow}", "holds": holds, "figures": f"{ratio:.2f} x"}


_WORDS = {True: "holds", False: "does not hold", None: "cannot be told: rounds overlap, or there is one"}


def format_step_report(result: dict[str, Any]) -> str:
    """Return the measurements as the table that the command prints."""
    host = result["machine"]
    lines = [
        f"{result['config']}: {result['ranks']} ranks, {result['global_batch_sequences']} sequences of "
        f"{result['sequence_length']} a step, {result['steps']} steps, median of {result['repeats']} rounds "
        f"({host['processor']}, {host['cores']} cores, torch {host['torch']})",
        f"{'':20} {'tokens/s':>9} {'spread':>17} {'step':>8} {'stall':>6} {'idle':>5}  received/step  peak of a rank",
    ]
    for mode, one in result["modes"].items():
        low, high = one["tokens_per_second_spread"]
        idle = "-" if one["idle_share"] is None else f"{one['idle_share']:.0%}"
        peaks = ", ".join(f"{role} {format_bytes(size)}" for role, size in one["peak_bytes"].items())
        lines.append(
            f"{mode:20} {one['tokens_per_second']:>9,.0f} {f'{low:,.0f}-{high:,.0f}':>17} "
            f"{one['step_seconds']:>6.3f} s {one['stall_share']:>6.1%} {idle:>5}  "
            f"{format_bytes(one['received_bytes_per_step']):>13}  {peaks}"
        )
    gathered = [one["teacher_gather_bytes_per_step"] for one in result["modes"].values()]
    lines.append("stall of a colocated rank: the teacher's forward, gathers included")
    if not host["gpus"]:
        lines.append("peak of a rank: the whole process from start to end, loading of whole models included")
    if max(gathered):
        lines.append(f"a colocated rank gathers {format_bytes(max(gathered))} of teacher weights a step (planned)")
    lines += [f"{one['claim']}: {_WORDS[one['holds']]} ({one['figures']})" for one in result["claims"]]
    return "\n".join(lines)


def _write_html(path: Path, result: dict[str, Any], runs: Sequence[Path]) -> None:
    from html import escape

    from disaggkd_cli.page import table, write_page
    from disaggkd_cli.report.read import read_runs
    from disaggkd_cli.report.render import render

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--html: {path.parent} cannot be made: {error.strerror}") from None
    rows = [[escape(one["claim"]), _WORDS[one["holds"]], escape(one["figures"])] for one in result["claims"]]
    figures = f"<pre>{escape(format_step_report(result))}</pre>"
    judged = table(("claim, on this machine", "", ""), rows)
    section = f"<section><h2>Measured</h2>{judged}<details><summary>as printed</summary>{figures}</details></section>"
    write_page(path, render(read_runs([str(run) for run in runs]), section), "--html")
