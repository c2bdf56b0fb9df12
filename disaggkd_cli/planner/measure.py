"""`--measure RUN_DIR`: what was predicted beside what a run recorded. `--calibrate RUN_DIR`: times fitted to it."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.timing import (
    colocated_teacher_time,
    colocated_timing,
    disaggregated_timing,
    servers,
    student_time,
    teacher_time,
)
from disaggkd_cli.planner.traffic import traffic
from disaggkd_cli.planner.workload import Workload

_WARM_UP = 0.2
"""Share of a run's first steps that count as warm-up and are left out of the medians."""


@dataclass(frozen=True)
class Recorded:
    """What a run left: medians over its steps after warm-up; rows and payload bytes of all steps, no evaluation."""

    steps: int
    step_seconds: float
    stall_seconds: float
    supervised_rows: float
    peak_memory_bytes: float
    received_bytes: int
    received_rows: int
    teacher_idle: float | None
    colocated: bool


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.measured else None


def measure_command(
    work: Workload, measure: str | None, calibrate: str | None, output: str | None, as_json: bool, console: Console
) -> int:
    """Print the comparison, or write the calibration; 0."""
    recorded = read_run(Path(measure or calibrate))
    if calibrate:
        path = Path(output) if output else Path(calibrate) / "calibration.yaml"
        fitted = fit(work, recorded, calibrate)
        path.write_text(
            "# Written by `disaggkd plan --calibrate`; use it as hardware.calibration.\n" + yaml.safe_dump(fitted),
            encoding="utf-8",
        )
        written = f"wrote {path}: " + ", ".join(f"{key} {value}" for key, value in fitted.items())
        console.print(written, highlight=False)
        return 0
    rows = compare(work, recorded)
    if as_json:
        plain = [{**vars(one), "error": one.error} for one in rows]
        console.print(json.dumps({"figures": plain}, indent=2), highlight=False, soft_wrap=True)
    else:
        console.print(_table(rows, recorded))
    return 0


def read_run(directory: Path) -> Recorded:
    """Read `metrics.jsonl` and `config.yaml` of a run's directory.

    Raises:
        UserError: no such run, or too few steps.
    """
    metrics = directory / "metrics.jsonl"
    try:
        texts = metrics.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{metrics} cannot be read: {error.strerror}; name the run_dir of a run that has trained"
        ) from None
    lines = [line for line in map(_parsed, texts) if line and "loss" in line]
    kept = lines[int(len(lines) * _WARM_UP) :]
    if len(kept) < 3:
        raise UserError(f"{metrics} has {len(lines)} training steps; at least 4 are needed for medians")

    def median(name: str) -> float:
        return statistics.median(float(line[name]) for line in kept)

    teachers = lines[-1].get("teachers") or {}
    idle = [one["idle_share"] for one in teachers.values() if one.get("idle_share") is not None]
    return Recorded(
        steps=len(lines),
        step_seconds=median("step_seconds"),
        stall_seconds=median("stall_seconds"),
        supervised_rows=median("supervised_tokens"),
        peak_memory_bytes=max(float(line["peak_memory_bytes"]) for line in lines),
        received_bytes=sum(int(line.get("received_bytes", 0)) for line in lines),
        received_rows=sum(int(line["supervised_tokens"]) for line in lines) if teachers else 0,
        teacher_idle=statistics.mean(idle) if idle else None,
        colocated=not teachers,
    )


def compare(work: Workload, recorded: Recorded) -> list[Compared]:
    """Predicted against recorded: bytes on the wire, memory, and times."""
    fused = work.implementation == "fused"
    mode = ("colocated_fused" if fused else "colocated_full") if recorded.colocated else "disaggregated_fused"
    timing = colocated_timing(work, fused=fused) if recorded.colocated else disaggregated_timing(work)
    role = "colocated" if recorded.colocated else "student"
    rows = []
    if recorded.received_rows:
        per_row = traffic(work).hidden_states.value
        rows.append(
            Compared("hidden states received", per_row * recorded.received_rows, recorded.received_bytes, "bytes")
        )
    peak = roles_of(work, mode)[role].peak_bytes
    if work.cluster.device == "cpu":
        # On CPUs a run records what the whole process takes, libraries and all: no figure to hold a prediction against.
        rows.append(Compared(f"peak of a {role} rank (measured: process)", peak, recorded.peak_memory_bytes, "bytes"))
    else:
        rows.append(Compared(f"peak memory of a {role} rank", peak, recorded.peak_memory_bytes, "bytes"))
    rows.append(Compared("step", work.step_tokens / timing.tokens_per_second, recorded.step_seconds, "seconds"))
    rows.append(
        Compared("stall share of a step", timing.stall_share, recorded.stall_seconds / recorded.step_seconds, "share")
    )
    if recorded.teacher_idle is not None:
        rows.append(Compared("teachers idle", timing.idle_share, recorded.teacher_idle, "share"))
    return rows


def fit(work: Workload, recorded: Recorded, run: str) -> dict[str, Any]:
    """Factors on the closed form's times that make it give the recorded ones, as a calibration file has them.

    Raises:
        UserError: the student only ever waited.
    """
    plain = work.with_(efficiency=replace(work.efficiency, teacher=1.0, student=1.0))
    fused = work.implementation == "fused"
    computing = (recorded.step_seconds - recorded.stall_seconds) / work.accumulation
    if computing <= 0:
        raise UserError(f"{run}: the student only ever waited, so its speed cannot be told; add teachers and run again")
    fitted: dict[str, Any] = {
        "student_time": _rounded(computing / student_time(plain, fused=fused).value),
        "run": str(run),
    }
    if recorded.colocated and recorded.stall_seconds > 0:
        busy = recorded.stall_seconds / work.accumulation
        fitted["teacher_time"] = _rounded(busy / colocated_teacher_time(plain).value)
    elif recorded.teacher_idle is not None and recorded.teacher_idle < 1:
        step = recorded.step_seconds / work.accumulation
        busy = step * (1 - recorded.teacher_idle) * servers(work) / work.student_ranks
        fitted["teacher_time"] = _rounded(busy / teacher_time(plain).value)
    return fitted


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _table(rows: list[Compared], recorded: Recorded) -> Table:
    title = f"predicted and measured over {recorded.steps} steps (medians after warm-up)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "predicted", "measured", "unit", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for one in rows:
        error = "-" if one.error is None else f"{one.error:+.1%}"
        table.add_row(one.name, f"{one.predicted:,.4g}", f"{one.measured:,.4g}", one.unit, error)
    return table
