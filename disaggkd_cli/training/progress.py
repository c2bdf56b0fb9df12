"""Show how a run goes: a rich bar on a terminal, plain lines otherwise. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from disaggkd_cli.terminal import console as terminal_console
from disaggkd_cli.units import format_seconds
from disaggkd_cli.verbosity import is_quiet, is_verbose

_SECONDS_BETWEEN_LINES = 5.0
_WIDE = 100
"""Columns of a terminal with room for a bar beside the figures."""


class RunProgress:
    """The progress of one run.

    Args:
        steps: all optimizer steps of the run.
        visible: False on ranks that show nothing.
    """

    def __init__(self, steps: int, *, visible: bool) -> None:
        self.console = terminal_console(stderr=True, quiet=not visible)
        self._steps = steps
        self._started = time.monotonic()
        self._first = 0
        self._last_line = 0.0
        self._bar: Progress | None = None

    def start(self, done: int) -> None:
        """Begin to count, `done` steps being done already; on a terminal a bar appears."""
        self._started = time.monotonic()
        self._first = done
        if self.console.is_terminal and not self.console.quiet and not is_quiet() and not is_verbose():
            # Where a terminal is narrow the figures are cut and the bar gives way; how far it is stays.
            wide = self.console.width >= _WIDE
            self._bar = Progress(
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                *([TextColumn("distilling"), BarColumn(bar_width=None)] if wide else []),
                TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                *([TimeElapsedColumn()] if wide else []),
                TextColumn("left", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                console=self.console,
            )
            self._task = self._bar.add_task("distilling", total=self._steps, completed=done, figures="")
            self._bar.start()

    def log(self, text: str) -> None:
        """Print one line, above the bar where there is one; when quiet, warnings only."""
        if is_quiet() and not text.startswith("warning"):
            return
        self.console.print(text, highlight=False, soft_wrap=True)

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """Show the figures after optimizer step `step` (from 1)."""
        stall = figures["stall_seconds"] / max(figures["step_seconds"], 1e-9)
        short = f"loss {figures['loss']:.4f}  {figures['tokens_per_second']:,.0f} tok/s  stall {stall:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=short)
            return
        now = time.monotonic()
        if is_verbose() or step in (self._first + 1, self._steps) or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (now - self._started) / (step - self._first) * (self._steps - step)
            agreement = f"agreement {figures['top1_agreement']:.1%}"
            self.log(f"step {step}/{self._steps}  {short}  {agreement}  left {format_seconds(left)}")

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()

    def before_and_after(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Print the closing table of held-out figures."""
        if is_quiet():
            return
        table = Table(title="on held-out text", title_justify="left")
        table.add_column("")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        table.add_column("teacher", justify="right")
        rows = {
            "perplexity": ("eval_perplexity", "{:,.1f}", "eval_teacher_perplexity"),
            "LM loss": ("eval_lm_loss", "{:.4f}", "eval_teacher_lm_loss"),
            "KD loss": ("eval_kd", "{:.4f}", None),
            "top-1 agreement with the teacher": ("eval_top1_agreement", "{:.1%}", None),
        }
        for title, (name, form, teachers) in rows.items():
            teacher = form.format(after[teachers]) if teachers in after else ""
            table.add_row(title, form.format(before[name]), form.format(after[name]), teacher)
        self.console.print(table)
        sys.stderr.flush()
