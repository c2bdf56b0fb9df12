"""Measured figures of a run: one JSON object a line, and TensorBoard beside it where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from disaggkd_cli import files
from disaggkd_cli.training.run_directory import RunDirectory


class MetricsLog:
    """Appends to `metrics.jsonl`, flushed line by line; a resumed run drops the lines it is about to do again.

    Args:
        directory: the run's directory.
        first_step: steps already done; later lines in an existing file are dropped.
    """

    def __init__(self, directory: RunDirectory, first_step: int) -> None:
        _drop_after(directory.metrics, first_step)
        self._file: TextIO = directory.metrics.open("a", encoding="utf-8")
        self._board = _tensorboard(directory.tensorboard, first_step)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Record figures of a step (steps are counted from 1: the figure after so many optimizer steps)."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; a last line cut off in mid-write is left out."""
    lines = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    if not path.exists():
        return
    files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def _tensorboard(path: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(path), purge_step=first_step + 1)
