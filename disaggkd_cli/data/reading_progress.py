"""Show how far reading the texts is: a rich bar on a terminal, plain lines now and then otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from disaggkd_cli.terminal import console as terminal_console

SECONDS_BETWEEN_LINES = 5.0


class TextsProgress:
    """Called by `load_splits`; a context manager that takes the bar down.

    Args:
        say: prints a line.
        bar: whether a bar may be shown, on a terminal.
    """

    def __init__(self, say: Callable[[str], None], *, bar: bool) -> None:
        self._say = say
        self._bar: Progress | None = None
        if bar and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[documents]}", markup=False),
                TimeElapsedColumn(),
                console=terminal_console(stderr=True),
                transient=True,
            )
        self._last = time.monotonic()

    def __enter__(self) -> TextsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, documents: int, share: float | None) -> None:
        count = f"{documents:,} documents" if documents else ""
        if self._bar is not None:
            self._show(what, count, share)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            figures = [count] if count else []
            figures += [f"{share:.0%}"] if share is not None else []
            self._say(f"{what}: {', '.join(figures)}" if figures else what)

    def _show(self, what: str, count: str, share: float | None) -> None:
        if not self._bar.task_ids:
            self._bar.add_task(what, total=1.0, documents=count)
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            description=what,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            documents=count,
        )
