"""When each rank did what, for a picture of how teacher and student overlap: `log.timeline`, off by default.

A line a piece of work in `run_dir/logs/<rank>.timeline.jsonl`. Times are those of the host (seconds since 1970), so
ranks of one machine can be laid beside each other; on a GPU they say when work was queued, not when it ran.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from disaggkd_cli.config import Config
from disaggkd_cli.training.run_directory import RunDirectory

ASK, FORWARD, WAIT, TRAIN, UPDATE, EVALUATE = "ask", "forward", "wait", "train", "update", "evaluate"
"""The student asks (a moment), a teacher computes a request; the student waits for a micro-batch's hidden states (of a
colocated teacher: computes them), trains on it, takes an optimizer step, evaluates."""

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


def moment() -> float:
    """Return the time of the host, in seconds since 1970; ranks of one machine agree on it."""
    return time.time()


@dataclass(frozen=True)
class Span:
    """A piece of work: `what`, from `start` to `end` (seconds since 1970), and the `request` it was for, if any."""

    what: str
    start: float
    end: float
    request: int | None = None


class Timeline:
    """Appends spans to a file, a line each; may be used from several threads. Without a file it does nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def add(self, what: str, start: float, request: int | None = None) -> None:
        """Record work that began at the `moment` `start` and has just ended."""
        if self._file is not None:
            line = json.dumps(asdict(Span(what, start, moment(), request))) + "\n"
            with self._lock:
                self._file.write(line)

    def asked(self, request: int) -> None:
        """Record that a request was sent on its way."""
        self.add(ASK, moment(), request)

    def timed(self, forward: Callable[[_Asked], _Answer]) -> Callable[[_Asked], _Answer]:
        """Return a forward that records each call; `forward` itself where nothing is recorded."""
        if self._file is None:
            return forward

        def recorded(request: _Asked) -> _Answer:
            start = moment()
            try:
                return forward(request)
            finally:
                self.add(FORWARD, start, getattr(request, "request_id", None))

        return recorded


def open_timeline(config: Config, directory: RunDirectory | None, rank: str) -> Timeline:
    """Return the timeline of the rank called `rank`, which writes only where `log.timeline` asks for it."""
    if not config.log.timeline or directory is None:
        return Timeline()
    return Timeline(directory.logs / f"{rank.replace(' ', '_')}.timeline.jsonl")


def read_timeline(logs: Path) -> dict[str, list[Span]]:
    """Return the spans of each rank by its name, such as `teacher_0`; a line cut off in mid-write is left out."""
    found: dict[str, list[Span]] = {}
    for path in sorted(logs.glob("*.timeline.jsonl")):
        spans = found.setdefault(path.name.removesuffix(".timeline.jsonl"), [])
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                spans.append(Span(**json.loads(text)))
            except (ValueError, TypeError):
                continue
    return found
