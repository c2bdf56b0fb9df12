"""How long a checkpoint that is being written has made no progress: a disk that hangs says nothing of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

_LOOK_SECONDS = 1.0


class SaveWatch:
    """Looks at a directory until it is closed. In a thread of its own, since a look hangs where the disk does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closed = threading.Event()
        self._changed_at = time.monotonic()
        threading.Thread(target=self._run, name="checkpoint watch", daemon=True).start()

    def silent_seconds(self) -> float:
        """Return for how long nothing has been seen to change in the directory."""
        return time.monotonic() - self._changed_at

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _run(self) -> None:
        seen: list[tuple[str, int, int]] = []
        while not self._closed.is_set():
            now = self._look()
            if now != seen:
                seen, self._changed_at = now, time.monotonic()
            self._closed.wait(_LOOK_SECONDS)

    def _look(self) -> list[tuple[str, int, int]]:
        found = []
        try:
            for path in sorted(self._directory.iterdir()):
                facts = path.stat()
                found.append((path.name, facts.st_size, facts.st_mtime_ns))
        except OSError:
            pass  # renamed, or removed, in this moment
        return found
