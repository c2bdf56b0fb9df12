"""Where the windows of a stream began, remembered so that a resumed run need not read what lies before."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from disaggkd_cli.data.tokenise.token_batches import BEGINNING, Position

logger = logging.getLogger("disaggkd")


@dataclass(frozen=True)
class WindowStart:
    """Where one window of a stream begins."""

    number: int = 0
    """Windows before it, all epochs together."""
    position: Position = BEGINNING
    """Where in the files."""
    first_sequence: int = 0
    """Sequences before it."""
    first_of_epoch: int = 0
    """Sequences before the epoch."""

    def after(self, sequences: int, position: Position) -> WindowStart:
        """The start of the next window, this one holding so many sequences."""
        return WindowStart(self.number + 1, position, self.first_sequence + sequences, self.first_of_epoch)

    def next_epoch(self) -> WindowStart:
        """The start of the next epoch, this being the end of one."""
        return WindowStart(self.number, BEGINNING, self.first_sequence, self.first_sequence)


class StreamIndex:
    """A file with a line per window."""

    def __init__(self, path: Path, fingerprint: str, *, write: bool) -> None:
        """
        Args:
            path: the file.
            fingerprint: names the stream; a file of another stream is not used, and replaced.
            write: whether this process adds to the file.
        """
        self._path = path
        self._fingerprint = fingerprint
        self._write = write
        self._starts = self._read()
        if write and not self._starts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"stream": fingerprint}) + "\n")

    def find(self, sequence: int) -> WindowStart:
        """The start of the last window known to begin at or before a sequence."""
        before = (start for start in self._starts if start.first_sequence <= sequence)
        return max(before, key=lambda start: start.number, default=WindowStart())

    def remember(self, start: WindowStart) -> None:
        """Add a window, unless it is known."""
        if self._write and (not self._starts or start.number > self._starts[-1].number):
            self._starts.append(start)
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(start)) + "\n")
            except OSError as error:
                # Resuming is slower without it, and no less exact.
                logger.warning("%s can't be added to (%s)", self._path, error.strerror)

    def _read(self) -> list[WindowStart]:
        try:
            header, *lines = self._path.read_text().splitlines()
            if json.loads(header) != {"stream": self._fingerprint}:
                return []
        except (OSError, ValueError):
            return []
        starts: list[WindowStart] = []
        for line in lines:
            try:
                fields = json.loads(line)
                number, (at, more) = fields["position"]
                fields["position"] = (int(number), (int(at), int(more)))
                start = WindowStart(**fields)
            except (ValueError, TypeError, KeyError):
                break  # a line that was being written when the process ended
            if start.number != len(starts):
                break
            starts.append(start)
        return starts
