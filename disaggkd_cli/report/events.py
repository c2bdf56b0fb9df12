"""What happened to links and ranks, read back from the logs of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \[([^\]]+)\] (.*)")
_KINDS = (
    ("joined", re.compile(r"(teacher|student) \S+ joined")),
    ("lost", re.compile(r"lost |.* lost student ")),
    ("refused", re.compile(r"refused |did not link with |checkpoint refused")),
    ("bad reply", re.compile(r"bad reply")),
    ("started", re.compile(r"(teacher|student) \S+: process \d+")),
    ("resumed", re.compile(r"resuming after step")),
    ("ended", re.compile(r"finished: answered|stopped: answered|.* ends(: |$)|student vanished")),
    ("rendezvous", re.compile(r".*the rendezvous")),
)


@dataclass(frozen=True)
class Event:
    """One line of a log that matters: when, on which rank, of which kind, and its words."""

    time: str
    rank: str
    kind: str
    text: str


def read_events(logs: Path) -> list[Event]:
    """Return the events of all logs in a directory, by time."""
    found = []
    for path in sorted(logs.glob("*.log")) if logs.is_dir() else []:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _LINE.match(line)
            kind = kind_of(match.group(3)) if match else None
            if kind is not None:
                found.append(Event(match.group(1), match.group(2), kind, match.group(3)))
    return sorted(found, key=lambda event: event.time)


def kind_of(text: str) -> str | None:
    """Return which kind of event a log line is, or None for other lines."""
    return next((kind for kind, pattern in _KINDS if pattern.match(text)), None)
