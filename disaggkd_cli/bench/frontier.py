"""`disaggkd bench frontier`: under a real cap on each rank's memory, grow the pair until each mode fails.

On CPUs the cap is the kernel's (RLIMIT_DATA: private writable memory), set on every process of a run, so that a rank
that wants more is refused. What a rank takes before it holds any model of note (interpreter, libraries, threads) is
measured first, on a pair of next to nothing, and granted on top of the cap: the cap is then for tensors, as the planner
counts them. It is in force from the first step on; loading, of which the planner knows nothing, is limited as well only
with `cap_loading`. Beside each measured cell stands the planner's prediction.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli.bench.runs import MODES, Say, machine, mode_overrides, out_of_memory, watch_run
from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.run_directory import RunDirectory, read_status
from disaggkd_cli.units import format_bytes, parse_bytes

_TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
_STEPS = 4
"""Steps that a cell must do: from the second on there is the optimizer's state. Checkpoints and the export, which take
memory of their own, are not waited for."""

OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"


@dataclass(frozen=True)
class FrontierOptions:
    """What `bench frontier` measures.

    Attributes:
        config, overrides: the pair to start from; its models are local directories with a config.json.
        cap: bytes that the tensors of a rank may take.
        teacher_layers, micro_batches, vocabularies: values to take one after the other, all else as in the config.
        modes: which of `MODES`.
        cap_loading: the cap is in force from a rank's start.
        timeout: seconds that one cell may take.
    """

    config: str
    overrides: Sequence[str] = ()
    cap: int = 512 << 20
    teacher_layers: Sequence[int] = ()
    micro_batches: Sequence[int] = ()
    vocabularies: Sequence[int] = ()
    modes: Sequence[str] = MODES
    cap_loading: bool = False
    timeout: float = 120.0


@dataclass
class Cell:
    """One pair in one mode.

    Attributes:
        axis, value: what was changed, and to what.
        predicted: `ok` or `out of memory`, by the closed forms; predicted_bytes: tensors by role.
        measured: `ok`, `out of memory`, or `failed` for any other end.
        measured_bytes: what each role took, less the baseline; when it ran out of memory, up to there.
        reason: which rank ran out of memory, or how else the run failed.
    """

    mode: str
    axis: str
    value: int
    predicted: str
    predicted_bytes: dict[str, int]
    measured: str
    measured_bytes: dict[str, int]
    reason: str = ""


def bench_frontier(options: FrontierOptions, say: Say) -> dict[str, Any]:
    """Measure and return `{machine, cap_bytes, baseline_bytes, cells: [Cell...], agreement, statements}`.

    Raises:
        UserError: the config's models have no config.json here, or it does not run on CPUs.
    """
    config = load(options.config, options.overrides, running=True)
    if config.launch.device != "cpu":
        raise UserError("launch.device: bench frontier limits the memory of CPU ranks; add launch.device=cpu")
    shapes = _shapes(options)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="disaggkd-frontier-") as temporary:
        maker = _Pairs(Path(temporary), Path(config.teacher.model), shapes)
        baseline = _baseline(options, maker, Path(temporary))
        say("baseline of a rank: " + ", ".join(f"{role} {format_bytes(size)}" for role, size in baseline.items()))
        for axis, values in _axes(options).items():
            for value in values:
                pair = maker.pair(**({axis: value} if axis != "micro_batch_sequences" else {}))
                for mode in options.modes:
                    cells.append(_cell(options, mode, axis, value, pair, baseline, Path(temporary)))
                    say(format_cell(cells[-1]))
    judged = [cell for cell in cells if cell.measured != FAILED]
    return {
        "machine": machine(),
        "config": options.config,
        "overrides": list(options.overrides),
        "cap_loading": options.cap_loading,
        "cap_bytes": options.cap,
        "baseline_bytes": baseline,
        "cells": [asdict(cell) for cell in cells],
        "agreement": {"agree": sum(cell.predicted == cell.measured for cell in judged), "cells": len(judged)},
        "statements": statements(cells),
    }


def _axes(options: FrontierOptions) -> dict[str, Sequence[int]]:
    axes = {
        "teacher_layers": options.teacher_layers,
        "micro_batch_sequences": options.micro_batches,
        "vocabulary": options.vocabularies,
    }
    found = {axis: values for axis, values in axes.items() if values}
    if not found:
        raise UserError("bench frontier: give values to grow: --teacher-layers, --micro-batches or --vocabularies")
    return found


def _shapes(options: FrontierOptions) -> dict[str, dict[str, Any]]:
    config = load(options.config, options.overrides)
    shapes = {}
    for side, name in (("teacher", config.teacher.model), ("student", config.student.model or "")):
        path = Path(name).expanduser() / "config.json"
        try:
            shapes[side] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{side}.model: {path} cannot be read ({error}); name a local model directory") from None
    return shapes


class _Pairs:
    """Makes model directories with random weights, of the config's shapes with some fields changed."""

    def __init__(self, root: Path, tokenizer: Path, shapes: dict[str, dict[str, Any]]) -> None:
        self._root = root
        self._tokenizer = tokenizer
        self._shapes = shapes

    def pair(self, teacher_layers: int | None = None, vocabulary: int | None = None, tiny: bool = False) -> list[str]:
        """Return the overrides that name a pair, making it first; the last pair made is deleted."""
        overrides = []
        for side, shape in self._shapes.items():
            changed = dict(shape)
            if vocabulary is not None:
                changed["vocab_size"] = vocabulary
            if side == "teacher" and teacher_layers is not None:
                changed["num_hidden_layers"] = teacher_layers
            if tiny:
                changed |= _TINY
            directory = self._root / side
            shutil.rmtree(directory, ignore_errors=True)
            self._make(changed, directory)
            overrides.append(f"{side}.model={directory}")
        return overrides

    def _make(self, fields: dict[str, Any], directory: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = {key: value for key, value in fields.items() if key not in ("dtype", "torch_dtype", "architectures")}
        fields.pop("layer_types", None)
        torch.manual_seed(0)
        model_type = fields.pop("model_type")
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self._tokenizer / name, directory / name)


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
        f"data.eval_sequences={config.student.ranks}",
        "transport.teacher_wait=10",
        "launch.threads=1",
    ]


def _baseline(options: FrontierOptions, maker: _Pairs, root: Path) -> dict[str, int]:
    """Return what a rank of each role takes with a pair of next to nothing and one short sequence a micro-batch."""
    pair = maker.pair(vocabulary=2048, tiny=True)
    found: dict[str, int] = {}
    needed = {"disaggregated_fused" if mode == "disaggregated_fused" else "colocated_fused" for mode in options.modes}
    directory = RunDirectory(root / "baseline")
    for mode in sorted(needed):
        shutil.rmtree(directory.root, ignore_errors=True)
        arguments = _arguments(options, mode, [*pair, "loss.memory_budget=1MiB"], directory.root)
        watched = watch_run(
            [*arguments, "--restarts", "0"],
            timeout=options.timeout,
            data_limit=1 << 50,
            limit_from=lambda: _loaded(directory),
            until=lambda: _trained(directory),
        )
        if not _trained(directory):
            raise UserError(f"bench frontier: the config does not run even with the smallest pair:\n{watched.output}")
        for role, size in watched.data_bytes.items():
            name = "colocated" if mode == "colocated_fused" else role
            found[name] = size
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
    more = [*pair]
    if axis == "micro_batch_sequences":
        more.append(f"train.micro_batch_sequences={value}")
    run_dir = root / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    arguments = _arguments(options, mode, more, run_dir)
    planned = roles_of(workload_of(load(arguments[0], arguments[1:])), mode)
    predicted = {role: round(rank.peak_bytes) for role, rank in planned.items()}
    roles = ["colocated"] if mode.startswith("colocated") else ["student", "teacher"]
    limit = options.cap + max(baseline[role] for role in roles)
    directory = RunDirectory(run_dir)

    def settled() -> bool:
        return _trained(directory) or out_of_memory(directory.logs) is not None

    watched = watch_run(
        [*arguments, "--restarts", "0"],
        timeout=options.timeout,
        data_limit=limit,
        limit_from=None if options.cap_loading else lambda: _loaded(directory),
        until=settled,
    )
    measured, reason = OK, ""
    if not _trained(directory):
        rank = out_of_memory(directory.logs, watched.output)
        measured = FAILED if rank is None else OUT_OF_MEMORY
        status = read_status(directory)
        reason = rank or (status.reason if status and status.reason else watched.output.strip()[-300:])
        reason += f", {_stage(directory)}"
    taken = {
        ("colocated" if mode.startswith("colocated") else role): size for role, size in watched.data_bytes.items()
    }
    return Cell(
        mode=mode,
        axis=axis,
        value=value,
        predicted=OK if max(predicted.values()) <= options.cap else OUT_OF_MEMORY,
        predicted_bytes=predicted,
        measured=measured,
        measured_bytes={role: max(0, size - baseline[role]) for role, size in taken.items()},
        reason=reason,
    )


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


def statements(cells: Sequence[Cell]) -> list[str]:
    """Return what the cells say about the claims, whichever way they fall."""
    found = []
    for axis in dict.fromkeys(cell.axis for cell in cells):
        fits = {
            mode: [cell.value for cell in cells if (cell.mode, cell.axis, cell.measured) == (mode, axis, OK)]
            for mode in dict.fromkeys(cell.mode for cell in cells)
        }
        largest = {mode: max(values, default=0) for mode, values in fits.items()}
        told = ", ".join(f"{mode} {value or 'none'}" for mode, value in largest.items())
        found.append(f"largest {axis} that trains: {told}")
        apart, together = largest.get("disaggregated_fused"), largest.get("colocated_fused")
        if apart is None or together is None:
            continue
        verdict = "holds" if apart > together else "does not hold"
        found.append(f"disaggregated trains where colocated with the fused loss is out of memory ({axis}): {verdict}")
    return found


def format_cell(cell: Cell) -> str:
    """Return a cell as one line."""

    def sizes(taken: dict[str, int]) -> str:
        return ", ".join(f"{role} {format_bytes(size)}" for role, size in taken.items())

    why = f" ({cell.reason.splitlines()[0][:100]})" if cell.reason else ""
    agree = "" if cell.predicted == cell.measured else "   <- differs"
    return (
        f"{cell.axis:>21} {cell.value:>6} {cell.mode:20} predicted {cell.predicted:13} {sizes(cell.predicted_bytes)}; "
        f"measured {cell.measured}{why} {sizes(cell.measured_bytes)}{agree}"
    )


def format_frontier_report(result: dict[str, Any]) -> str:
    """Return the measurements as the text that the command prints."""
    host = result["machine"]
    baseline = ", ".join(f"{role} {format_bytes(size)}" for role, size in result["baseline_bytes"].items())
    agreement = result["agreement"]
    lines = [
        f"{result['config']}: {format_bytes(result['cap_bytes'])} of tensors a rank (RLIMIT_DATA above a baseline of "
        f"{baseline}; {host['processor']}, {host['cores']} cores, torch {host['torch']})",
        *(format_cell(Cell(**cell)) for cell in result["cells"]),
        f"prediction and measurement agree in {agreement['agree']} of {agreement['cells']} cells",
        *result["statements"],
    ]
    return "\n".join(lines)


def parse_cap(text: str) -> int:
    """Return the bytes of `--cap`.

    Raises:
        UserError: it is no size, or smaller than anything could run in.
    """
    size = parse_bytes(text)
    if size < 16 << 20:
        raise UserError(f"--cap {text}: is less than 16 MiB; give what a rank's tensors may take, such as 512MiB")
    return size
