"""Measured figures of a run: one JSON object a line, and the trackers that the config names beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from disaggkd_cli import files
from disaggkd_cli.config import LogConfig
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.samples import Sample, as_markdown
from disaggkd_cli.training.step_lines import read_step_lines
from disaggkd_cli.training.tracking import Trackers


class MetricsLog:
    """Appends to `metrics.jsonl`, flushed line by line; a resumed run drops the lines it is about to do again.

    Args:
        directory: the run's directory.
        first_step: steps already done; later lines in an existing file are dropped.
        settings: the trackers besides.
        log: told which earlier lines are missing or damaged.

    Raises:
        UserError: the client of a tracker that was named is not installed.
    """

    def __init__(
        self,
        directory: RunDirectory,
        first_step: int,
        settings: LogConfig,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        _drop_after(directory.metrics, first_step, log)
        self._file: TextIO = directory.metrics.open("a", encoding="utf-8")
        self._trackers = Trackers(settings, directory, first_step)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Record figures of a step (steps are counted from 1: the figure after so many optimizer steps)."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        self._trackers.write(step, figures)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Hand samples to the trackers, a text a table; see `SamplesTable`."""
        for name in dict.fromkeys(sample.table for sample in samples):
            self._trackers.write_text(step, name, as_markdown([one for one in samples if one.table == name]))

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file that can be read; a line cut off in mid-write, or damaged, is left out."""
    return read_step_lines(path)[0]


def _drop_after(path: Path, step: int, log: Callable[[str], None]) -> None:
    if not path.exists():
        return
    lines, others = read_step_lines(path)
    kept = [line for line in lines if line["step"] <= step]
    if others:
        log(f"warning: {path}: {others} damaged lines are left out")
    trained = {line["step"] for line in kept if "loss" in line}
    if missing := [number for number in range(1, step + 1) if number not in trained]:
        log(f"warning: {path}: has no lines of {_runs(missing)}, though these steps are done; they stay missing")
    files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words, such as `steps 1-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "steps " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
