"""When the student writes what: windows of `every` steps, with weights that are a fixed number of windows old."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """Window w holds steps w · every … (w + 1) · every - 1 and is written after step (w - lag) · every, or before any.

    Attributes:
        every: optimizer steps of a window.
        lag: windows between the weights that write and those that are trained on what was written.
        steps: of the whole run.
    """

    every: int
    lag: int
    steps: int

    def of_step(self, step: int) -> int:
        """The window whose texts the optimizer step with this index (from 0) trains on."""
        return step // self.every

    def written_after(self, window: int) -> int:
        """How many optimizer steps the weights have seen that write a window."""
        return max(0, (window - self.lag) * self.every)

    def due(self, done: int) -> list[int]:
        """The windows to be written when `done` steps are done, in order."""
        if done % self.every:
            return []
        newest = done // self.every + self.lag
        windows = range(newest + 1) if done == 0 else [newest]
        return [window for window in windows if window * self.every < self.steps]

    def steps_of(self, window: int) -> range:
        """The optimizer steps of a window that the run has."""
        return range(window * self.every, min((window + 1) * self.every, self.steps))

    def open(self, done: int) -> list[int]:
        """The windows that are written once `done` steps are done, those due then aside, and not yet trained whole."""
        first = self.of_step(done)
        return [
            window
            for window in range(first, first + self.lag + 1)
            if window * self.every < self.steps and done > 0 and self.written_after(window) < done
        ]
