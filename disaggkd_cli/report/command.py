"""`disaggkd report RUN_DIR...`: read, draw, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disaggkd_cli.page import write_page
from disaggkd_cli.report.read import read_runs
from disaggkd_cli.report.render import render
from disaggkd_cli.verbosity import say


def report_command(paths: Sequence[str], output: str) -> int:
    """Write the page of the runs at `paths` and say where; 0.

    Raises:
        UserError: a path is no run directory, or the page cannot be written.
    """
    runs = read_runs(paths)
    write_page(Path(output).expanduser(), render(runs), "--output")
    for run in runs:
        state = run.status.state if run.status else "not started yet"
        say(f"{run.name}: {state}, {len(run.steps)} steps recorded")
    say(f"wrote {output}")
    return 0
