"""Trackio, through its own client, which finds a run by its name."""

from __future__ import annotations

import uuid

from disaggkd_cli.training.trackers.tracker import Opening, TrackerEntry


class _Trackio:
    def __init__(self, opening: Opening) -> None:
        import trackio

        self.run_id = opening.run_id or f"{opening.root.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(project=opening.project, name=self.run_id, resume="allow")

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKIO = TrackerEntry("trackio", "trackio", _Trackio)
