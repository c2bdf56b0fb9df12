"""`disaggkd bench frontier`: under a real cap on each rank's memory, grow the pair until each mode fails.

On CPUs the cap is the kernel's (RLIMIT_DATA: private writable memory), set on every process of a run, so that a rank
that wants more is refused. What a rank takes before it holds any model of note (interpreter, libraries, threads) is
measured first, by role, on a pair of next to nothing, and granted on top of the cap: the cap is then for tensors, as
the planner counts them. It is in force from the first step on; loading, of which the planner knows nothing, is limited
as well only with `cap_loading`. On GPUs torch's allocator refuses what lies above the cap, from a rank's start; without
a cap it is the device's own memory (not run on a GPU yet). Beside each measured cell stands the planner's prediction.
Every cell is kept when it is measured, so that a bench that is cut off loses one at most.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from disaggkd_cli import __version__
from disaggkd_cli.bench.frontier_pairs import Pairs, read_shapes
from disaggkd_cli.bench.frontier_report import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    Cell,
    agreement,
    format_cell,
    statements,
)
from disaggkd_cli.bench.results import Results, default_root
from disaggkd_cli.bench.runs import MODES, Log, machine, mode_overrides, out_of_memory, watch_run
from disaggkd_cli.config import load, to_yaml
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import RankMemory
from disaggkd_cli.training.memory_record import read_memory_records
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.run_directory import RunDirectory, read_status
from disaggkd_cli.units import format_bytes, parse_bytes

_STEPS = 3
"""Steps that a cell must do: from the second on there is the optimizer's state. Checkpoints and the export, which take
memory of their own, are not waited for."""


@dataclass(frozen=True)
class FrontierOptions:
    """What `bench frontier` measures.

    Attributes:
        config, overrides: the pair to start from; its models are local directories with a config.json.
        cap: bytes that the tensors of a rank may take; None: 512 MiB on CPUs, the device's memory on GPUs.
        teacher_layers, teacher_widths, micro_batches, vocabularies: values to take one after the other, all else as in
            the config.
        ranks: total numbers of ranks, teachers' included; the global batch stays, so micro-batches shrink.
        modes: which of `MODES`.
        cap_loading: the cap is in force from a rank's start.
        results, fresh: as for `bench step`.
        timeout: seconds that one cell may take.
    """

    config: str
    overrides: Sequence[str] = ()
    cap: int | None = None
    teacher_layers: Sequence[int] = ()
    teacher_widths: Sequence[int] = ()
    micro_batches: Sequence[int] = ()
    vocabularies: Sequence[int] = ()
    ranks: Sequence[int] = ()
    modes: Sequence[str] = MODES
    cap_loading: bool = False
    results: str | None = None
    fresh: bool = False
    timeout: float = 180.0


def bench_frontier(options: FrontierOptions, log: Log) -> dict[str, Any]:
    """Measure and return `{machine, cap_bytes, baseline_bytes, cells: [Cell...], agreement, statements}`.

    Raises:
        UserError: the config's models have no config.json here, or there is no GPU and it does not ask for CPUs.
    """
    config = load(options.config, options.overrides, running=True)
    gpu = config.launch.device != "cpu"
    options = replace(options, cap=options.cap or (_gpu_bytes() if gpu else 512 << 20))
    shapes = read_shapes(load(options.config, options.overrides))
    axes = _axes(options)
    for value in options.ranks:
        _with_ranks(options, value)
    told = {name: value for name, value in asdict(options).items() if name not in ("results", "fresh", "timeout")}
    arguments = {**told, "resolved": to_yaml(config), "shapes": shapes, "version": __version__}
    root = Path(options.results).expanduser() if options.results else default_root(
        config.run_dir, "frontier", arguments
    )  # fmt: skip
    results = Results(root, arguments, fresh=options.fresh, log=log)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="disaggkd-frontier-") as temporary:
        pairs = Pairs(Path(temporary), Path(config.teacher.model), shapes, config.teacher.dtype)
        kept = results.find(baseline=True) or results.add(
            {"baseline": True, "bytes": {} if gpu else _baseline(options, pairs, Path(temporary))}
        )
        baseline = kept["bytes"]
        if baseline:
            log("baseline of a rank: " + ", ".join(f"{role} {format_bytes(size)}" for role, size in baseline.items()))
        for axis, value, mode in [(a, v, m) for a, values in axes.items() for v in values for m in options.modes]:
            kept = results.find(mode=mode, axis=axis, value=value)
            if kept is None or kept["measured"] == FAILED:
                measured = _cell(options, mode, axis, value, pairs.pair(axis, value), baseline, Path(temporary))
                kept = results.add(asdict(measured))
                log(format_cell(measured))
            cells.append(Cell(**kept))
    results.finish()
    return {
        "machine": machine(),
        "config": options.config,
        "overrides": list(options.overrides),
        "cap_loading": options.cap_loading,
        "cap_bytes": options.cap,
        "baseline_bytes": baseline,
        "results": str(results.path),
        "cells": [asdict(cell) for cell in cells],
        "agreement": agreement(cells, options.cap),
        "statements": statements(cells),
    }


def _axes(options: FrontierOptions) -> dict[str, Sequence[int]]:
    axes = {
        "teacher_layers": options.teacher_layers,
        "teacher_width": options.teacher_widths,
        "micro_batch_sequences": options.micro_batches,
        "vocabulary": options.vocabularies,
        "ranks": options.ranks,
    }
    found = {axis: values for axis, values in axes.items() if values}
    if not found:
        raise UserError(
            "bench frontier: give values to grow: --teacher-layers, --teacher-widths, --micro-batches, --vocabularies "
            "or --ranks"
        )
    return found


def _with_ranks(options: FrontierOptions, total: int) -> list[str]:
    """Return the overrides that give the config so many ranks in all, with the same global batch."""
    config = load(options.config, options.overrides)
    students = total - config.teacher_ranks
    micro, rest = divmod(config.global_batch_sequences, max(1, students) * config.train.accumulation)
    if students < 1 or rest or micro < 1 or config.global_batch_sequences % (total * config.train.accumulation):
        raise UserError(
            f"--ranks {total}: {config.teacher_ranks} teacher ranks and a step of {config.global_batch_sequences} "
            f"sequences do not go with it; the step must be a multiple of {total} and of {max(1, students)} sequences"
        )
    return [f"student.ranks={students}", f"train.micro_batch_sequences={micro}"]


def _arguments(options: FrontierOptions, mode: str, more: Sequence[str], run_dir: Path) -> list[str]:
    overrides = [*options.overrides, *more]
    config = load(options.config, overrides)
    return [
        options.config,
        *overrides,
        *mode_overrides(config, mode),
        f"run_dir={run_dir}",
        "train.steps=1000",
        "train.eval_every=0",
        "train.save_every=0",
        f"data.eval_sequences={config.student.ranks + config.teacher_ranks}",
        "transport.teacher_wait=60",
        "launch.threads=1",
    ]


def _baseline(options: FrontierOptions, pairs: Pairs, root: Path) -> dict[str, int]:
    """Return what a rank of each role takes with a pair of next to nothing and one short sequence a micro-batch."""
    pair = pairs.smallest()
    found: dict[str, int] = {}
    needed = {"disaggregated_fused" if mode == "disaggregated_fused" else "colocated_fused" for mode in options.modes}
    directory = RunDirectory(root / "baseline")
    for mode in sorted(needed):
        shutil.rmtree(directory.root, ignore_errors=True)
        arguments = _arguments(options, mode, [*pair, "loss.memory_budget=1MiB"], directory.root)
        watched = watch_run(
            [*arguments, "--restarts", "0"],
            timeout=options.timeout,
            data_limits={"student": 1 << 50, "teacher": 1 << 50},
            limit_from=lambda: _loaded(directory),
            until=lambda: _trained(directory),
        )
        if not _trained(directory):
            raise UserError(f"bench frontier: the config does not run even with the smallest pair:\n{watched.output}")
        for role, size in watched.data_bytes.items():
            found["colocated" if mode == "colocated_fused" else role] = size
    return found


def _cell(
    options: FrontierOptions,
    mode: str,
    axis: str,
    value: int,
    pair: Sequence[str],
    baseline: dict[str, int],
    root: Path,
) -> Cell:
    """Measure one cell. An empty baseline means GPUs: their allocator limits and counts tensors alone."""
    more = [*pair]
    if axis == "micro_batch_sequences":
        more.append(f"train.micro_batch_sequences={value}")
    if axis == "ranks":
        more += _with_ranks(options, value)
    run_dir = root / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    arguments = _arguments(options, mode, more, run_dir)
    planned = roles_of(workload_of(load(arguments[0], arguments[1:])), mode)
    predicted = {role: round(rank.peak_bytes) for role, rank in planned.items()}
    colocated = mode.startswith("colocated")
    roles = {"student": "colocated"} if colocated else {"student": "student", "teacher": "teacher"}
    limits = {role: options.cap + baseline[name] for role, name in roles.items()} if baseline else None
    directory = RunDirectory(run_dir)
    watched = watch_run(
        [*arguments, "--restarts", "0"],
        timeout=options.timeout,
        data_limits=limits,
        limit_from=None if options.cap_loading else lambda: _loaded(directory),
        until=lambda: _trained(directory) or out_of_memory(directory.logs) is not None,
        gpu_cap=None if baseline else options.cap,
    )
    measured, reason = OK, ""
    if not _trained(directory):
        rank = out_of_memory(directory.logs, watched.output)
        measured = FAILED if rank is None else OUT_OF_MEMORY
        status = read_status(directory)
        reason = rank or (status.reason if status and status.reason else watched.output.strip()[-300:])
        reason += f", {_stage(directory)}"
    taken = {roles[role]: max(0, size - baseline[roles[role]]) for role, size in watched.data_bytes.items() if baseline}
    if not baseline:
        taken = _allocated(directory, roles)
    return Cell(
        mode=mode,
        axis=axis,
        value=value,
        predicted=OK if max(predicted.values()) <= options.cap else OUT_OF_MEMORY,
        predicted_bytes=predicted,
        measured=measured,
        measured_bytes=taken,
        reason=reason,
        fullest=_fullest(planned),
    )


def _allocated(directory: RunDirectory, roles: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in read_memory_records(directory.logs):
        role = roles[record.rank.split()[0]]
        found[role] = max(found.get(role, 0), record.peak_bytes)
    return found


def _gpu_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        raise UserError("launch.device: there is no GPU here; add launch.device=cpu to limit the memory of CPU ranks")
    return torch.cuda.get_device_properties(0).total_memory


def _fullest(planned: dict[str, RankMemory]) -> dict[str, Any]:
    role, rank = max(planned.items(), key=lambda item: item[1].peak_bytes)
    components: dict[str, int] = {}
    for one in rank.binding.terms:
        components[one.name] = components.get(one.name, 0) + round(one.value)
    return {"role": role, "phase": rank.binding.name, "components": {k: v for k, v in components.items() if v}}


def _loaded(directory: RunDirectory) -> bool:
    """Whether the evaluation before the first step is done, so that everything is in its place."""
    return bool(read_metrics(directory.metrics))


def _trained(directory: RunDirectory) -> bool:
    return any("loss" in line and line["step"] >= _STEPS for line in read_metrics(directory.metrics))


def _stage(directory: RunDirectory) -> str:
    """Return how far a run got: loading, which takes memory that is no part of training, is told apart."""
    lines = read_metrics(directory.metrics)
    if not lines:
        return "loading, or evaluating for the first time"
    return f"after step {max(line['step'] for line in lines)}"


def parse_cap(text: str) -> int:
    """Return the bytes of `--cap`.

    Raises:
        UserError: it is no size, or smaller than anything could run in.
    """
    size = parse_bytes(text)
    if size < 16 << 20:
        raise UserError(f"--cap {text}: is less than 16 MiB; give what a rank's tensors may take, such as 512MiB")
    return size
