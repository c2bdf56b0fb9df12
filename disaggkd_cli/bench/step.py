"""`disaggkd bench step`: one pair, the same data and global batch, trained in all three modes in turns.

Every mode is a real `disaggkd run` on the same number of ranks. Rounds are interleaved (the order rotates), so that
what else the machine does falls on all modes alike; medians over the rounds are reported, with their spread. On CPUs a
short run of each mode before them is for memory alone: in it, freed memory goes back to the system at once. Every
finished run is kept at once, so that a bench that is cut off loses the run that was going and no other.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli import __version__
from disaggkd_cli.bench.layouts import LAYOUT_MODES, layout_overrides, moved_bytes_per_token
from disaggkd_cli.bench.on_policy import ON_POLICY_MODES, on_policy_overrides, writing_figures, written_sequences
from disaggkd_cli.bench.results import Results, default_root
from disaggkd_cli.bench.runs import MODES, Log, machine, mode_overrides, watch_run
from disaggkd_cli.config import Config, load, to_yaml
from disaggkd_cli.errors import RunError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.traffic import traffic
from disaggkd_cli.training.memory_record import read_memory_records
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.units import format_bytes

_MEMORY_ROUND, _MEMORY_STEPS = 0, 3
_WARM_UP = 0.25
"""Share of a run's first steps that count as warm-up."""


@dataclass(frozen=True)
class StepBenchOptions:
    """What `bench step` measures.

    Attributes:
        config, overrides: the pair; `train.steps` and what is saved and evaluated are set by the bench.
        steps: optimizer steps of each run, a quarter of them warm-up.
        repeats: rounds.
        modes: which of `MODES`, `LAYOUT_MODES` and `ON_POLICY_MODES`.
        memory: measure memory in runs of their own (CPUs only; on GPUs the allocator counts exactly).
        results: the directory that keeps finished runs; None: one beside the config's run_dir, named by the arguments.
        fresh: begin anew even where an earlier try left runs.
        timeout: seconds that one run may take.
    """

    config: str
    overrides: Sequence[str] = ()
    steps: int = 20
    repeats: int = 3
    modes: Sequence[str] = MODES
    memory: bool = True
    results: str | None = None
    fresh: bool = False
    timeout: float = 900.0


def bench_step(options: StepBenchOptions, log: Log, html: str | None = None) -> dict[str, Any]:
    """Measure and return `{machine, modes: {name: {tokens_per_second, peak_bytes, stall_share, ...}}, claims, ...}`.

    Args:
        log: called with a line as each run ends.
        html: also write a page with the runs' curves overlaid.

    Raises:
        UserError: the config cannot be shared out among the ranks, or `html` or the results cannot be written.
        RunError: a run failed.
    """
    from disaggkd_cli.bench.step_report import claims, write_html

    config = load(options.config, options.overrides, running=True)
    extra = {mode: _overrides(config, mode) for mode in options.modes}
    results = _results(options, config, log)
    host = machine()
    exact = bool(host["gpus"]) and config.launch.device != "cpu"
    for_memory = [_MEMORY_ROUND] if options.memory and not exact else []
    rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for repeat in (*for_memory, *range(1, options.repeats + 1)):
        shift = (repeat - 1) % len(options.modes)
        for mode in (*options.modes[shift:], *options.modes[:shift]):
            kept = results.find(mode=mode, round=repeat)
            if kept is None:
                kept = results.add(_run(options, mode, repeat, extra[mode], config, results.root))
                took = ", ".join(f"{role} {format_bytes(size)}" for role, size in kept["training_bytes"].items())
                told = f"round {repeat} of {options.repeats}: {mode} {_rate(kept):,.0f} tokens/s"
                log(told if repeat else f"memory: {mode} {took}")
            rounds[mode].append(kept)
    result = {
        "machine": host,
        "config": options.config,
        "overrides": list(options.overrides),
        "ranks": config.student.ranks + config.teacher_ranks,
        "global_batch_sequences": config.global_batch_sequences,
        "sequence_length": config.data.sequence_length,
        "steps": options.steps,
        "repeats": options.repeats,
        "memory_runs": bool(for_memory),
        "results": str(results.path),
        "modes": {mode: figures(runs) for mode, runs in rounds.items()},
    }
    result["claims"] = claims(result["modes"])
    if html is not None:
        write_html(Path(html), result, [results.root / runs[-1]["directory"] for runs in rounds.values()])
    results.finish()
    return result


def _overrides(config: Config, mode: str) -> list[str]:
    if mode in ON_POLICY_MODES:
        return on_policy_overrides(config, mode)
    return layout_overrides(config, mode) if mode in LAYOUT_MODES else mode_overrides(config, mode)


def _results(options: StepBenchOptions, config: Config, log: Log) -> Results:
    told = asdict(options)
    for name in ("results", "fresh", "timeout"):
        del told[name]
    arguments = {**told, "config": options.config, "resolved": to_yaml(config), "version": __version__}
    root = Path(options.results).expanduser() if options.results else default_root(config.run_dir, "step", arguments)
    return Results(root, arguments, fresh=options.fresh, log=log)


def _run(
    options: StepBenchOptions, mode: str, repeat: int, extra: Sequence[str], config: Config, root: Path
) -> dict[str, Any]:
    """Do one run and return what is kept of it; its directory stays, without checkpoints and the exported student."""
    directory = RunDirectory(root / (f"{mode}_{repeat}" if repeat else f"{mode}_memory"))
    steps = options.steps if repeat else _MEMORY_STEPS
    shutil.rmtree(directory.root, ignore_errors=True)  # of a try that was cut off
    overrides = [
        *options.overrides,
        *extra,
        f"run_dir={directory.root}",
        f"train.steps={steps}",
        "train.eval_every=0",
        "train.save_every=0",
        f"data.eval_sequences={max(1, config.global_batch_sequences)}",
    ]

    def training() -> bool:
        lines = read_metrics(directory.metrics)
        return bool(lines) and lines[-1]["step"] < steps

    arguments = [options.config, *overrides, "--restarts", "0"]
    watched = watch_run(arguments, timeout=options.timeout, training=training, tidy_allocator=not repeat)
    if watched.code != 0:
        raise RunError(f"`disaggkd run {' '.join(arguments)}` ended with exit code {watched.code}:\n{watched.output}")
    for heavy in (directory.checkpoints, directory.export, directory.tensorboard):
        shutil.rmtree(heavy, ignore_errors=True)
    return {
        "mode": mode,
        "round": repeat,
        "directory": directory.root.name,
        "steps": [line for line in read_metrics(directory.metrics) if "loss" in line],
        **_memory(directory, watched.resident_bytes, watched.training_bytes, mode),
        **_planned(planned := load(options.config, overrides)),
        "written_sequences": written_sequences(planned, steps),
    }


def _memory(
    directory: RunDirectory, resident: dict[str, int], training: dict[str, int], mode: str
) -> dict[str, dict[str, int]]:
    """Return the highest figures of a rank by role, as the record of a run keeps them."""
    start: dict[str, int] = {}
    allocated: dict[str, int] = {}
    for record in read_memory_records(directory.logs):
        role = record.rank.split()[0]
        start[role] = min(start.get(role, record.start_bytes), record.start_bytes)
        if record.device.startswith("cuda"):
            allocated[role] = max(allocated.get(role, 0), record.peak_bytes)
    above = {role: max(0, size - start.get(role, 0)) for role, size in training.items()}
    found = {"peak_bytes": allocated or resident, "training_bytes": allocated or above, "start_bytes": start}
    # (A colocated rank calls itself a student.)
    if mode.startswith("colocated"):
        found = {name: {"colocated": max(sizes.values())} for name, sizes in found.items() if sizes}
    return found


def _planned(config: Config) -> dict[str, Any]:
    colocated = config.mode == "colocated"
    ranks = {"colocated" if colocated else "student": config.student.ranks}
    gathered = traffic(workload_of(config)).colocated_teacher.value * config.train.accumulation
    return {
        "ranks": ranks if colocated else {**ranks, "teacher": config.teacher_ranks},
        "teacher_gather_bytes_per_step": round(gathered) if colocated else 0,
        "teacher_moved_bytes_per_token": 0.0 if colocated else moved_bytes_per_token(config),
    }


def _warm(run: dict[str, Any]) -> list[dict[str, Any]]:
    lines = run["steps"]
    return lines[int(len(lines) * _WARM_UP) :]


def _rate(run: dict[str, Any]) -> float:
    """Return tokens a second over all steps after warm-up, slow ones included."""
    tokens = sum(line["tokens_per_second"] * line["step_seconds"] for line in _warm(run))
    return tokens / sum(line["step_seconds"] for line in _warm(run))


def _share(run: dict[str, Any], name: str) -> float:
    return sum(line[name] for line in _warm(run)) / sum(line["step_seconds"] for line in _warm(run))


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one mode from its kept runs: medians over the rounds, peaks the highest of all rounds.

    Memory in training is that of the runs for memory alone, where there are any.
    """
    for_memory = [run for run in runs if run["round"] == _MEMORY_ROUND] or runs
    runs = [run for run in runs if run["round"] != _MEMORY_ROUND]
    colocated = "colocated" in runs[0]["ranks"]
    rates = [_rate(run) for run in runs]
    step = statistics.median(line["step_seconds"] for run in runs for line in _warm(run))
    stall = statistics.median(_share(run, "stall_seconds") for run in runs)
    idle = None if colocated else statistics.median(_idle(run["steps"][-1]) for run in runs)
    highest = {
        name: {role: max(run[name].get(role, 0) for run in among) for role in among[0].get(name, ())}
        for name, among in (("peak_bytes", runs), ("training_bytes", for_memory), ("start_bytes", runs))
    }
    found = {
        "ranks": runs[0]["ranks"],
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_spread": [min(rates), max(rates)],
        "rounds": rates,
        "step_seconds": step,
        **highest,
        "stall_share": stall,
        "stall_is": "the teacher's forward, gathers included" if colocated else "waiting for hidden states",
        "idle_share": idle,
        "student_seconds": step * (1 - stall),
        "wait_seconds": step * stall,
        "teacher_busy_seconds": step * (stall if idle is None else 1 - idle),
        "received_bytes_per_step": statistics.median(line["received_bytes"] for line in _warm(runs[0])),
        "teacher_gather_bytes_per_step": runs[0]["teacher_gather_bytes_per_step"],
        "teacher_moved_bytes_per_token": runs[0]["teacher_moved_bytes_per_token"],
        "losses": [line["loss"] for line in runs[0]["steps"]],
    }
    if any(runs[0].get("written_sequences", ())):
        parts = [writing_figures(_warm(run), run["written_sequences"]) for run in runs]
        found["writing"] = {
            name: statistics.median(one[name] for one in parts) for name in parts[0] if name != "shares"
        }
        found["writing"]["shares"] = {
            part: statistics.median(one["shares"][part] for one in parts) for part in parts[0]["shares"]
        }
    return found


def _idle(line: dict[str, Any]) -> float:
    shares = [one["idle_share"] for one in (line.get("teachers") or {}).values() if one["linked"]]
    return sum(shares) / len(shares) if shares else 0.0
