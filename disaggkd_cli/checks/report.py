"""Show results: a table, the masks as coloured text, or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from disaggkd_cli.checks.result import FAIL, NOT_APPLICABLE, PASS, CheckResult
from disaggkd_cli.units import format_seconds

_STYLES = {PASS: "green", FAIL: "bold red", NOT_APPLICABLE: "dim"}
_SUPERVISED = "black on green"
BRACKETS = ("⟦", "⟧")
"""Stand around supervised text where there is no colour."""


def print_results(results: list[CheckResult], console: Console) -> None:
    """Print the samples' masks, the table, and one closing line."""
    for result in results:
        print_samples(result.values.get("samples", []), console)
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("figure", overflow="fold")
    table.add_column("why", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for result in results:
        style = _STYLES[result.outcome]
        table.add_row(
            result.name, Text(result.outcome, style=style), Text(result.figure), Text(result.why),
            f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(Text(summary(results)))


def print_line(result: CheckResult, console: Console) -> None:
    """Print one result in one line, at once, also into a pipe."""
    outcome = Text(f"{result.outcome:5}", style=_STYLES[result.outcome])
    figure = result.figure if result.outcome == PASS else result.why
    console.print(outcome, Text(f"{result.name} ({format_seconds(result.seconds)}): {figure}"), soft_wrap=True)
    console.file.flush()


def summary(results: list[CheckResult]) -> str:
    """Return how many passed, failed and did not apply, in one line."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in _STYLES}
    failed = [result.name for result in results if result.outcome == FAIL]
    line = f"{counts[PASS]} passed, {counts[FAIL]} failed"
    if counts[NOT_APPLICABLE]:
        line += f", {counts[NOT_APPLICABLE]} not applicable"
    line += f" in {format_seconds(sum(result.seconds for result in results))}"
    return line + (f"; failed: {', '.join(failed)}" if failed else "")


def print_samples(samples: list[dict], console: Console) -> None:
    """Print what is supervised: on green, or in ⟦brackets⟧ where there is no colour."""
    coloured = console.color_system is not None and not console.no_color
    for sample in samples:
        marks = "on green" if coloured else "in ⟦brackets⟧"
        console.print(Text(f"sequence {sample['sequence']}, supervised text {marks}:", style="bold"))
        text = Text()
        for part, supervised in sample["segments"]:
            if supervised and coloured:
                text.append(part, style=_SUPERVISED)
            else:
                text.append(f"{BRACKETS[0]}{part}{BRACKETS[1]}" if supervised else part)
        console.print(text)
        console.print()


def to_json(results: list[CheckResult]) -> str:
    """Return `{passed, checks: [{name, outcome, figure, why, values, seconds}]}`."""
    passed = all(result.outcome != FAIL for result in results)
    return json.dumps({"passed": passed, "checks": [_plain(asdict(result)) for result in results]}, indent=2)


def _plain(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, infinities) by their names."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
