"""What `bench frontier` says of its cells: the table, how well the planner did, and claims whichever way they fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disaggkd_cli.units import format_bytes

OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"
APART, TOGETHER = "disaggregated_fused", "colocated_fused"
_FEWEST = ("ranks",)
"""Axes on which less is more."""


@dataclass
class Cell:
    """One pair in one mode.

    Attributes:
        axis, value: what was changed, and to what.
        predicted: `ok` or `out of memory`, by the closed forms; predicted_bytes: tensors by role.
        measured: `ok`, `out of memory`, or `failed` for any other end.
        measured_bytes: what each role took, less the baseline; when it ran out of memory, up to there.
        reason: which rank ran out of memory, or how else the run failed.
        fullest: the fullest planned rank: role, phase, and its components in bytes.
    """

    mode: str
    axis: str
    value: int
    predicted: str
    predicted_bytes: dict[str, int]
    measured: str
    measured_bytes: dict[str, int]
    reason: str = ""
    fullest: dict[str, Any] = field(default_factory=dict)


def agreement(cells: Sequence[Cell], cap: int) -> dict[str, Any]:
    """Return how many predictions came true, and how far the planned bytes of cells that trained were off.

    `near_cap` counts cells planned within 5% of the cap, which may fall either way.
    """
    judged = [cell for cell in cells if cell.measured != FAILED]
    errors = [
        max(cell.predicted_bytes.values()) / max(cell.measured_bytes[_role(cell)], 1) - 1
        for cell in judged
        if cell.measured == OK and cell.measured_bytes.get(_role(cell))
    ]
    return {
        "agree": sum(cell.predicted == cell.measured for cell in judged),
        "cells": len(judged),
        "near_cap": sum(abs(max(cell.predicted_bytes.values()) / cap - 1) < 0.05 for cell in judged),
        "error": [min(errors), max(errors)] if errors else None,
    }


def _role(cell: Cell) -> str:
    return max(cell.predicted_bytes, key=lambda role: cell.predicted_bytes[role])


def statements(cells: Sequence[Cell]) -> list[str]:
    """Return what the cells say about the claims, whichever way they fall."""
    found: list[str] = []
    told_why = False
    for axis in dict.fromkeys(cell.axis for cell in cells):
        here = [cell for cell in cells if cell.axis == axis]
        modes = list(dict.fromkeys(cell.mode for cell in here))
        fits = {mode: [cell.value for cell in here if (cell.mode, cell.measured) == (mode, OK)] for mode in modes}
        best = min if axis in _FEWEST else max
        told = ", ".join(f"{mode} {best(values, default='none')}" for mode, values in fits.items())
        found.append(f"{'fewest' if axis in _FEWEST else 'largest'} {axis} that trains: {told}")
        if APART not in modes or TOGETHER not in modes:
            continue
        lost = {cell.value for cell in here if (cell.mode, cell.measured) == (TOGETHER, OUT_OF_MEMORY)}
        where = [value for value in fits[APART] if value in lost]
        verdict = f"holds at {', '.join(map(str, where))}" if where else "does not hold"
        found.append(f"disaggregated trains where colocated with the fused loss is out of memory ({axis}): {verdict}")
        if where and not told_why:
            told_why = True
            found += [_why(next(one for one in here if (one.mode, one.value) == (mode, where[0])))
                      for mode in (TOGETHER, APART)]  # fmt: skip
    return found


def _why(cell: Cell) -> str:
    """Return what fills the fullest rank of a cell, by the planner's components."""
    parts = cell.fullest.get("components", {})
    told = [f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1])[:5]]
    return (
        f"{cell.mode} at {cell.axis} {cell.value}, fullest rank as planned ({cell.fullest.get('role')}, "
        f"{cell.fullest.get('phase')}): {', '.join(told)}; {format_bytes(max(cell.predicted_bytes.values()))} in all"
    )


def format_cell(cell: Cell) -> str:
    """Return a cell as one line."""

    def sizes(taken: dict[str, int]) -> str:
        return ", ".join(f"{role} {format_bytes(size)}" for role, size in taken.items())

    why = f" ({cell.reason.splitlines()[0][:100]})" if cell.reason else ""
    agree = "" if cell.predicted == cell.measured else "   <- differs"
    return (
        f"{cell.axis:>21} {cell.value:>6} {cell.mode:20} predicted {cell.predicted:13} {sizes(cell.predicted_bytes)}; "
        f"measured {cell.measured}{why} {sizes(cell.measured_bytes)}{agree}"
    )


def format_frontier_report(result: dict[str, Any]) -> str:
    """Return the measurements as the text that the command prints."""
    host = result["machine"]
    baseline = ", ".join(f"{role} {format_bytes(size)}" for role, size in result["baseline_bytes"].items())
    how = f"RLIMIT_DATA above a baseline of {baseline}" if baseline else "the GPU's allocator"
    return "\n".join(
        [
            f"{result['config']}: {format_bytes(result['cap_bytes'])} of tensors a rank ({how}; {host['processor']}, "
            f"{host['cores']} cores, torch {host['torch']})",
            *(format_cell(Cell(**cell)) for cell in result["cells"]),
            format_agreement(result["agreement"]),
            *result["statements"],
        ]
    )


def format_agreement(found: dict[str, Any]) -> str:
    """Return how well the planner did, as one sentence."""
    text = f"prediction and measurement agree in {found['agree']} of {found['cells']} cells"
    if found.get("near_cap"):
        text += f" ({found['near_cap']} were planned within 5% of the cap)"
    if found.get("error"):
        low, high = found["error"]
        text += f"; the fullest rank of cells that trained was planned {low:+.0%} to {high:+.0%} off what it took"
    return text
