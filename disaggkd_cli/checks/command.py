"""`disaggkd check`: options to output. Returns the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from disaggkd_cli.config import load


def check_command(path: str, overrides: Sequence[str], only: list[str] | None = None, as_json: bool = False) -> int:
    """Check the config at `path` and print what was found.

    Returns:
        0 when no check failed, 1 otherwise.

    Raises:
        UserError: the config, a model or the texts cannot be read.
    """
    config = load(path, overrides, running=True)
    progress = Console(stderr=True)
    with progress.status("starting", spinner="dots") as status:
        from disaggkd_cli.checks.report import print_results, to_json
        from disaggkd_cli.checks.result import FAIL
        from disaggkd_cli.checks.run import run_checks

        results = run_checks(config, only or None, status.update)
    if as_json:
        sys.stdout.write(to_json(results) + "\n")
    else:
        print_results(results, Console())
    return 1 if any(result.outcome == FAIL for result in results) else 0
