"""What each rank of a run recorded of its own memory. Written by `training.process`; read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryRecord:
    """What one rank's process took so far. Every rank writes its own beside its log, teachers too.

    Attributes:
        rank: its name, such as `teacher 0`.
        device: `cpu`, `cuda:0`.
        start_bytes: resident when the libraries were imported and nothing was loaded yet.
        peak_bytes: highest so far: allocated on the GPU, or resident on CPUs (the whole process, `start_bytes` and
            the loading of whole models included).
    """

    rank: str
    device: str
    start_bytes: int
    peak_bytes: int

    @property
    def above_start(self) -> int:
        """The peak without what the interpreter and its libraries take; on a GPU the peak itself."""
        return self.peak_bytes if self.device.startswith("cuda") else max(0, self.peak_bytes - self.start_bytes)


def record_path(logs: Path, rank: str) -> Path:
    """Return where the rank called `rank` writes its record."""
    return logs / f"{rank.replace(' ', '_')}.memory.json"


def read_memory_records(logs: Path) -> list[MemoryRecord]:
    """Return the records that the ranks of a run left, by rank; damaged ones are left out."""
    found = []
    for path in sorted(logs.glob("*.memory.json")) if logs.is_dir() else []:
        try:
            found.append(MemoryRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return found
