"""The trackers of one run: opened by its config, and let go of one by one where they fail."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from disaggkd_cli import files
from disaggkd_cli.config import LogConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.trackers import TRACKERS, TrackerEntry
from disaggkd_cli.training.trackers.tracker import Opening, TakesTexts, Tracker

logger = logging.getLogger("disaggkd")


def wanted_trackers(settings: LogConfig) -> dict[str, str]:
    """Return tracker -> project of those that `log` asks for and whose client is installed.

    Raises:
        UserError: the client of one that was named is not installed.
    """
    wanted = {}
    for name in (field.name for field in fields(settings) if field.name in TRACKERS):
        value = getattr(settings, name)
        if value is None or value is False:
            continue
        entry = TRACKERS[name]
        if _installed(entry):
            wanted[name] = value if isinstance(value, str) else ""
        elif not entry.optional:
            raise UserError(
                f"log.{name}: the package {entry.package} is not installed; pip install 'disaggkd[{name}]', or set "
                f"log.{name}=null"
            )
        else:
            logger.info("log.%s: nothing is written for it, since %s is not installed", name, entry.package)
    return wanted


class Trackers:
    """Hands each step's figures to the trackers of a run.

    A tracker that fails is named in the log and let go of; the run and `metrics.jsonl` go on. The ids by which a
    resumed run goes on with its runs lie in `run_dir/trackers.json`.
    """

    def __init__(self, settings: LogConfig, directory: RunDirectory, first_step: int) -> None:
        self._open: dict[str, Tracker] = {}
        known = _run_ids(directory.trackers)
        ids = {}
        for name, project in wanted_trackers(settings).items():
            # A run that begins at its first step is a new one, also where an older one lay in the same place.
            run_id = known.get(f"{name}/{project}") if first_step else None
            opening = Opening(project, directory.root.resolve(), first_step, run_id)
            tracker = self._try(name, lambda name=name, opening=opening: TRACKERS[name].open(opening))
            if tracker is None:
                continue
            self._open[name] = tracker
            if tracker.run_id is not None:
                ids[f"{name}/{project}"] = tracker.run_id
        if ids:
            files.write_text(directory.trackers, json.dumps({**known, **ids}, indent=2) + "\n")

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Hand over those of a step's figures that are numbers."""
        numbers = {
            name: value
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.write(step, numbers))

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Hand a text of a step to those that take texts."""
        for tracker_name, tracker in list(self._open.items()):
            if isinstance(tracker, TakesTexts):
                self._try(tracker_name, lambda tracker=tracker: tracker.write_text(step, name, markdown))

    def close(self) -> None:
        """Close them all."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, act: Any) -> Any:
        try:
            return act()
        except Exception as error:  # clients raise many kinds, and none of them is worth a run
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            logger.warning("log.%s: no more figures go there (%s); metrics.jsonl has them all", name, reason)
            return None


def _installed(entry: TrackerEntry) -> bool:
    return importlib.util.find_spec(entry.package) is not None


def _run_ids(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
