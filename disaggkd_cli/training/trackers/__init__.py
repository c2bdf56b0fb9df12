"""Trackers: where figures of a run go besides `metrics.jsonl`, one entry each, by the key under `log`.

A new tracker is a file like `tensorboard.py`, a line below, its key in `config.schema.LogConfig`, and a test.
"""

from __future__ import annotations

from disaggkd_cli.training.trackers.mlflow import MLFLOW
from disaggkd_cli.training.trackers.tensorboard import TENSORBOARD
from disaggkd_cli.training.trackers.tracker import TrackerEntry
from disaggkd_cli.training.trackers.trackio import TRACKIO
from disaggkd_cli.training.trackers.wandb import WANDB

__all__ = ["TRACKERS", "TrackerEntry"]

TRACKERS: dict[str, TrackerEntry] = {entry.name: entry for entry in (TENSORBOARD, WANDB, MLFLOW, TRACKIO)}
"""By their key under `log`."""
