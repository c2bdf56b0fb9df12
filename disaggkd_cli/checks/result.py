"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not applicable"


@dataclass(frozen=True)
class CheckResult:
    """One line of the table.

    Attributes:
        outcome: `pass`, `fail` or `not applicable`.
        figure: what was measured, in a few words.
        why: what was compared; for a failure what it means and what to do; or why it does not apply.
        values: the numbers behind the figure, for `--json`.
        name, seconds: filled in by `run_checks`.
    """

    outcome: str
    figure: str
    why: str
    values: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


def judge(passed: bool, figure: str, compared: str, blame: str, **values: Any) -> CheckResult:
    """Return a pass that says what was `compared`, or a fail that says also whom to `blame`."""
    if passed:
        return CheckResult(PASS, figure, compared, values)
    return CheckResult(FAIL, figure, f"{compared}: {blame}", values)


def not_applicable(why: str, figure: str = "") -> CheckResult:
    """Return a result for a check that has nothing to check here."""
    return CheckResult(NOT_APPLICABLE, figure, why)
