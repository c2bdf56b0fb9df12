"""What a tracker is: something that takes the figures of a step, through a client of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


class Tracker(Protocol):
    """One run at a tracker. Whatever its methods raise costs the run this tracker, and nothing else.

    Attributes:
        run_id: by which the client finds this run again when it is resumed; None where files are enough.
    """

    run_id: str | None

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Take the figures of a step; one step may come twice, with other figures."""

    def close(self) -> None:
        """Hand over what is still waiting."""


@runtime_checkable
class TakesTexts(Protocol):
    """A tracker that shows texts too; those that do not are handed none."""

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Take a text of a step, such as a table of samples."""


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with.

    Attributes:
        project: what the key under `log` says: a project or an experiment.
        root: the run's directory; its name is the run's.
        first_step: steps already done; later ones are done again.
        run_id: of the run that is resumed; None for a new one.
    """

    project: str
    root: Path
    first_step: int
    run_id: str | None


@dataclass(frozen=True)
class TrackerEntry:
    """One tracker.

    Attributes:
        name: the key under `log`, and the extra that installs its client.
        package: what must be importable.
        open: starts a run at it, or goes on with one.
        optional: whether a missing package is passed over; else it is an error of the config.
    """

    name: str
    package: str
    open: Callable[[Opening], Tracker]
    optional: bool = False
