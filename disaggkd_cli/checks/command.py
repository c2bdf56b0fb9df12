"""`disaggkd check`: options to output. Returns the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disaggkd_cli.config import load
from disaggkd_cli.terminal import console as terminal_console
from disaggkd_cli.terminal import write
from disaggkd_cli.verbosity import is_quiet

if TYPE_CHECKING:
    from disaggkd_cli.checks.result import CheckResult


def check_command(path: str, overrides: Sequence[str], only: list[str] | None = None, as_json: bool = False) -> int:
    """Check the config at `path` and print what was found.

    Returns:
        0 when no check failed, 1 otherwise.

    Raises:
        UserError: the config, a model or the texts cannot be read.
    """
    config = load(path, overrides, running=True)
    progress, shown = terminal_console(stderr=True), terminal_console(stderr=as_json)
    with progress.status("starting", spinner="dots") as status:
        from disaggkd_cli.checks.report import print_line, print_results, summary, to_json
        from disaggkd_cli.checks.result import FAIL
        from disaggkd_cli.checks.run import run_checks

        def ended(result: CheckResult) -> None:
            if not is_quiet() or result.outcome == FAIL:
                print_line(result, shown)

        results = run_checks(config, only or None, status.update, ended)
    if as_json:
        write(to_json(results))
    elif is_quiet():
        write(summary(results))
    else:
        print_results(results, shown)
    return 1 if any(result.outcome == FAIL for result in results) else 0
