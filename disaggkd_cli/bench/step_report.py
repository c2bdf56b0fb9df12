"""What `bench step` says: the table, the reason for a speed-up, claims whichever way they fall, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from disaggkd_cli.bench.layouts import format_layouts
from disaggkd_cli.bench.on_policy import ON_POLICY_MODES, format_writing
from disaggkd_cli.errors import UserError
from disaggkd_cli.units import format_bytes

EQUAL_LOSS = 1e-5
"""Losses that lie no further apart than this count as the same."""

ALIKE = 0.02
"""Peaks that differ by no more than this share are the same: pages, threads and texts weigh a little either way."""

_WORDS = {True: "holds", False: "does not hold", None: "cannot be told"}
_ORDERS = (
    ("disaggregated_fused", "colocated_fused"),
    ("disaggregated_fused", "colocated_full"),
    ("colocated_fused", "colocated_full"),
)


def claims(modes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the measurements say of the claims that they can judge: `{claim, holds, figures}` each.

    A speed-up holds only when the slowest round of one mode beats the fastest of the other; `None` means that the
    rounds overlap, or that there was only one, or that peaks are alike. Memory is that of training alone.
    """
    found = []
    first = next(iter(modes))
    for mode in list(modes)[1:]:
        if mode in ON_POLICY_MODES:
            continue  # weights of another age write other texts
        pairs = zip(modes[first]["losses"], modes[mode]["losses"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        found.append(
            {"claim": f"same loss: {mode} and {first}", "holds": apart <= EQUAL_LOSS, "figures": f"{apart:.2g} apart"}
        )
    if set(ON_POLICY_MODES) <= set(modes):
        found.append(_faster("on_policy_lag_1", "on_policy_lag_0", modes))
    here = [pair for pair in _ORDERS if set(pair) <= set(modes)]
    found += [_faster(fast, slow, modes) for fast, slow in here]
    for lean, fat in here:
        sizes = [max((modes[one]["training_bytes"] or modes[one]["peak_bytes"]).values()) for one in (lean, fat)]
        alike = abs(sizes[0] - sizes[1]) <= ALIKE * max(sizes)
        found.append(
            {
                "claim": f"less memory in the fullest rank: {lean} than {fat}",
                "holds": None if alike else sizes[0] < sizes[1],
                "figures": f"{format_bytes(sizes[0])} against {format_bytes(sizes[1])}{', alike' if alike else ''}",
            }
        )
    return found


def _faster(fast: str, slow: str, modes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    low, high = modes[fast]["tokens_per_second_spread"], modes[slow]["tokens_per_second_spread"]
    holds = True if low[0] > high[1] else False if low[1] < high[0] else None
    why = ", rounds overlap" if holds is None else ""
    if min(len(modes[one]["rounds"]) for one in (fast, slow)) < 2:
        holds, why = None, ", one round"
    ratio = modes[fast]["tokens_per_second"] / modes[slow]["tokens_per_second"]
    return {"claim": f"faster: {fast} than {slow}", "holds": holds, "figures": f"{ratio:.2f} x{why}"}


def reasons(modes: dict[str, dict[str, Any]]) -> list[str]:
    """Return where the time of a step goes, side by side, as far as both ways were measured.

    What gathers cost, and the ranks' waiting for each other in them, is a difference: the teacher's forward where it is
    sharded, less the busy time of the resident teacher on the same tokens, shared over as many ranks.
    """
    apart = modes.get("disaggregated_fused")
    found = []
    for name, one in modes.items():
        if "colocated" not in one["ranks"]:
            continue
        text = (
            f"{name}: {one['wait_seconds']:.3f} s of a step are the teacher's forward on every rank, which gathers "
            f"{format_bytes(one['teacher_gather_bytes_per_step'])} of its weights; {one['student_seconds']:.3f} s are "
            "the student's"
        )
        if apart is not None:
            alone = apart["teacher_busy_seconds"] * apart["ranks"]["teacher"] / one["ranks"]["colocated"]
            rest = "so the rest is gathering and waiting for each other" if one["wait_seconds"] > alone else "no less"
            text += f"; a resident teacher's share of the same tokens takes {alone:.3f} s, {rest}"
        found.append(text)
    if apart is not None:
        found.append(
            f"disaggregated_fused: the teacher gathers nothing and is busy {apart['teacher_busy_seconds']:.3f} s of a "
            f"step beside the student's {apart['student_seconds']:.3f} s; the student waits "
            f"{apart['wait_seconds']:.3f} s"
        )
    return found


def format_step_report(result: dict[str, Any]) -> str:
    """Return the measurements as the table that the command prints."""
    host = result["machine"]
    lines = [
        f"{result['config']}: {result['ranks']} ranks, {result['global_batch_sequences']} sequences of "
        f"{result['sequence_length']} a step, {result['steps']} steps, median of {result['repeats']} rounds "
        f"({host['processor']}, {host['cores']} cores, torch {host['torch']})",
        f"{'':20} {'tokens/s':>9} {'spread':>17} {'step':>8} {'stall':>6} {'idle':>5}  received/step  peak in training",
    ]
    for mode, one in result["modes"].items():
        low, high = one["tokens_per_second_spread"]
        idle = "-" if one["idle_share"] is None else f"{one['idle_share']:.0%}"
        lines.append(
            f"{mode:20} {one['tokens_per_second']:>9,.0f} {f'{low:,.0f}-{high:,.0f}':>17} "
            f"{one['step_seconds']:>6.3f} s {one['stall_share']:>6.1%} {idle:>5}  "
            f"{format_bytes(one['received_bytes_per_step']):>13}  {peaks_by_role(one)}"
        )
    lines.append("stall of a colocated rank: the teacher's forward, gathers included")
    if not host["gpus"]:
        lines.append(
            "peak in training: of the fullest rank of each role, above what Python and its libraries take"
            + (", in a short run of its own in which freed memory goes back at once" if result["memory_runs"] else "")
        )
        whole = [f"{mode} {_sizes(one['peak_bytes'])}" for mode, one in result["modes"].items()]
        lines.append(f"whole processes, loading and saving included: {'; '.join(whole)}")
    lines += format_layouts(result["modes"])
    lines += format_writing(result["modes"])
    lines += reasons(result["modes"])
    lines += [f"{one['claim']}: {_WORDS[one['holds']]} ({one['figures']})" for one in result["claims"]]
    return "\n".join(lines)


def peaks_by_role(one: dict[str, Any]) -> str:
    """Return a mode's peaks in training by role, as one text."""
    return _sizes(one["training_bytes"] or one["peak_bytes"])


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{role} {format_bytes(size)}" for role, size in sizes.items())


def write_html(path: Path, result: dict[str, Any], runs: Sequence[Path]) -> None:
    """Write a page with the claims, the table, and the first round's curves overlaid.

    Raises:
        UserError: the page cannot be written.
    """
    from disaggkd_cli.page import table, write_page
    from disaggkd_cli.report.read import read_runs
    from disaggkd_cli.report.render import render

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--html: {path.parent} cannot be made: {error.strerror}") from None
    rows = [[escape(one["claim"]), _WORDS[one["holds"]], escape(one["figures"])] for one in result["claims"]]
    why = "".join(f"<li>{escape(text)}</li>" for text in reasons(result["modes"]))
    figures = f"<pre>{escape(format_step_report(result))}</pre>"
    judged = table(("claim, on this machine", "", ""), rows).replace("<table>", '<table class="text">', 1)
    section = (
        f'<section><h2>Measured</h2>{judged}<ul class="terms">{why}</ul>'
        f"<details><summary>as printed</summary>{figures}</details></section>"
    )
    write_page(path, render(read_runs([str(run) for run in runs]), section), "--html")
