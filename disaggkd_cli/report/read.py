"""Read what a run has left so far. Runs that still go, or ended badly, are read as far as they got."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disaggkd_cli.config import Config, load
from disaggkd_cli.errors import UserError
from disaggkd_cli.page.charts import Point, colour_of
from disaggkd_cli.report.events import Event, read_events
from disaggkd_cli.training.memory_record import MemoryRecord, read_memory_records
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.run_directory import RunDirectory, Status, read_status

_WARM_UP = 0.2
"""Share of the first steps that medians leave out, as `plan --measure` does."""


@dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        name: what the page calls it.
        colour: its colour in every chart.
        directory: where it lies.
        config: the resolved config, or None with `config_problem` where it cannot be read.
        status: the recorded state, or None before the student has started.
        environment: versions, machine and placement, as far as recorded.
        steps: metrics lines of training steps, in order.
        evaluations: metrics lines of evaluations, in order.
        memory: what each rank recorded of its own memory.
        events: links that joined and died, restarts, and the like, by time.
        age_seconds: since the metrics were last written; None where there are none.
    """

    name: str
    colour: str
    directory: RunDirectory
    config: Config | None
    config_problem: str
    status: Status | None
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    memory: list[MemoryRecord]
    events: list[Event]
    age_seconds: float | None

    @property
    def started_in(self) -> Path:
        """The directory that relative paths of the config are meant from.

        Recorded; of older runs what `run_dir` says; else the run's own directory, where a name of the config leads to
        nothing rather than to a file that happens to lie where the report is made.
        """
        recorded = self.environment.get("working_directory")
        if isinstance(recorded, str) and Path(recorded).is_dir():
            return Path(recorded)
        root = self.directory.root.resolve()
        named = Path(self.config.run_dir) if self.config else root
        if not named.is_absolute() and named.parts and root.parts[-len(named.parts) :] == named.parts:
            return root.parents[len(named.parts) - 1]
        return root

    @property
    def colocated(self) -> bool:
        """Whether teacher and student shared ranks."""
        return self.config is not None and self.config.mode == "colocated"

    @property
    def kind(self) -> str:
        """Mode and loss, such as `colocated, full logits`."""
        if self.config is None:
            return "config unreadable"
        loss = "fused loss" if self.config.loss.implementation == "fused" else "full logits"
        return f"{self.config.mode}, {loss}"

    @property
    def planned_steps(self) -> int | None:
        """Steps that the run is to do."""
        return self.config.train.steps if self.config else None

    def series(self, name: str) -> list[Point]:
        """Return (step, value) of a figure of training steps; steps that lack it are left out."""
        return _points(self.steps, name)

    def held_out(self, name: str) -> list[Point]:
        """Return (step, value) of a figure of evaluations."""
        return _points(self.evaluations, name)

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the steps after warm-up, or None without any."""
        values = [y for _, y in self.series(name)]
        kept = values[int(len(values) * _WARM_UP) :]
        return statistics.median(kept) if kept else None

    def share(self, name: str) -> float | None:
        """Return the share of the steps' time that a figure in seconds takes, after warm-up."""
        kept = self.steps[int(len(self.steps) * _WARM_UP) :]
        whole = sum(line.get("step_seconds", 0.0) for line in kept)
        return sum(line.get(name, 0.0) for line in kept) / whole if whole > 0 else None

    def idle_shares(self) -> list[float]:
        """Return the idle share of each teacher that is linked at the last step."""
        last = self.steps[-1].get("teachers") or {} if self.steps else {}
        return [one["idle_share"] for one in last.values() if one.get("linked") and one.get("idle_share") is not None]

    def elapsed(self) -> list[tuple[float, dict[str, Any]]]:
        """Return (seconds of training so far, line) of each step; evaluations and saves are not counted."""
        spent, found = 0.0, []
        for line in self.steps:
            spent += line.get("step_seconds", 0.0)
            found.append((spent, line))
        return found


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Return the runs in the order given.

    Raises:
        UserError: a path is no run directory.
    """
    directories = [Path(path).expanduser() for path in paths]
    names = _names(directories)
    return [
        _read(directory, name, colour_of(index))
        for index, (directory, name) in enumerate(zip(directories, names, strict=True))
    ]


def _read(root: Path, name: str, colour: str) -> Run:
    if not root.is_dir():
        raise UserError(f"{root}: is no directory; name the run_dir of a run, such as runs/quickstart")
    directory = RunDirectory(root)
    if not directory.config.exists() and not directory.metrics.exists():
        raise UserError(f"{root}: holds neither config.yaml nor metrics.jsonl, so it is no run directory")
    config, problem = None, ""
    try:
        config = load(directory.config)
    except UserError as error:
        problem = str(error)
    lines = [line for line in read_metrics(directory.metrics) if isinstance(line, dict) and "step" in line]
    age = time.time() - directory.metrics.stat().st_mtime if directory.metrics.exists() else None
    return Run(
        name,
        colour,
        directory,
        config,
        problem,
        read_status(directory),
        _environment(directory.environment),
        [line for line in lines if "loss" in line],
        [line for line in lines if "eval_kd" in line],
        read_memory_records(directory.logs),
        read_events(directory.logs),
        age,
    )


def _environment(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest tails of the paths that tell them apart."""
    absolute = [path.resolve() for path in directories]
    for length in range(1, max(len(path.parts) for path in absolute) + 1):
        names = ["/".join(path.parts[-length:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({index + 1})" for index, path in enumerate(directories)]


def _points(lines: Sequence[dict[str, Any]], name: str) -> list[Point]:
    found = [(float(line["step"]), line.get(name)) for line in lines]
    return [(step, float(y)) for step, y in found if isinstance(y, (int, float)) and math.isfinite(y)]
