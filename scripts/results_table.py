"""Print the README's results as a Markdown block, from measurements made by this very command on this machine.

    python scripts/results_table.py [--config configs/two-cores.yaml] [--rounds 3] [--steps 8] [--cap 268MiB]
    python scripts/results_table.py --step STEP.json --frontier FRONTIER.json ...

The first form runs `disaggkd bench step` and `disaggkd bench frontier`; the second takes what they printed with --json
(--frontier may be given again: cells add up). Claims that do not hold are printed as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from disaggkd_cli.units import format_bytes

TITLES = {
    "colocated_full": "colocated, full logits",
    "colocated_fused": "colocated, fused loss",
    "disaggregated_fused": "disaggregated, fused loss",
}
AXES = {
    "teacher_layers": "layers of the teacher",
    "micro_batch_sequences": "sequences a micro-batch",
    "vocabulary": "size of the vocabulary",
}
VERDICTS = {True: "holds", False: "**does not hold**", None: "cannot be told"}
GROWN = {
    "--teacher-layers": (4, 8, 16, 24),
    "--micro-batches": (2, 8, 16, 32),
    "--vocabularies": (8192, 12288, 16384, 24576),
}


def measured(*arguments: str) -> dict[str, Any]:
    """Run `disaggkd bench` with `--json` and return what it printed."""
    command = [sys.executable, "-m", "disaggkd_cli", "bench", *arguments, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def step_block(result: dict[str, Any]) -> list[str]:
    """Return the lines of the three modes side by side, and the claims."""
    lines = [
        f"`disaggkd bench step {result['config']} --steps {result['steps']} --repeats {result['repeats']}`: "
        f"{result['ranks']} ranks, {result['global_batch_sequences']} sequences of {result['sequence_length']} tokens "
        "a step, median (lowest to highest) of the rounds.",
        "",
        "| mode | tokens/s | step | student waits | teacher idle | peak of a rank (whole process) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for mode, one in result["modes"].items():
        low, high = one["tokens_per_second_spread"]
        idle = "" if one["idle_share"] is None else f"{one['idle_share']:.0%}"
        waits = f"{one['stall_share']:.0%}" + ("" if one["idle_share"] is not None else " (teacher's forward)")
        peaks = ", ".join(f"{role} {format_bytes(size)}" for role, size in one["peak_bytes"].items())
        lines.append(
            f"| {TITLES[mode]} | {one['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f}) | "
            f"{one['step_seconds']:.3f} s | {waits} | {idle} | {peaks} |"
        )
    lines += ["", "| claim, on this machine | | |", "|---|---|---|"]
    for one in result["claims"]:
        claim = one["claim"]
        for mode, title in TITLES.items():
            claim = claim.replace(mode, title)
        lines.append(f"| {claim} | {VERDICTS[one['holds']]} | {one['figures']} |")
    return lines


def frontier_block(results: list[dict[str, Any]]) -> list[str]:
    """Return a line a grown value, with measured and predicted for each mode, and what follows from them."""
    first = results[0]
    cells = [cell for result in results for cell in result["cells"]]
    baseline = ", ".join(f"{role} {format_bytes(size)}" for role, size in first["baseline_bytes"].items())
    lines = [
        f"`disaggkd bench frontier {first['config']} --cap {format_bytes(first['cap_bytes']).replace(' ', '')} ...`: "
        f"real runs in which the kernel refuses a rank more memory (RLIMIT_DATA; baseline of a rank without a model: "
        f"{baseline}). Measured, and in brackets what the planner predicted for the fullest rank.",
        "",
        "| grown | " + " | ".join(TITLES.values()) + " |",
        "|---|" + "---|" * len(TITLES),
    ]
    for axis, value in dict.fromkeys((cell["axis"], cell["value"]) for cell in cells):
        row = {cell["mode"]: cell for cell in cells if (cell["axis"], cell["value"]) == (axis, value)}
        lines.append(f"| {AXES[axis]}: {value:,} | " + " | ".join(_cell(row.get(mode)) for mode in TITLES) + " |")
    agree = sum(result["agreement"]["agree"] for result in results)
    judged = sum(result["agreement"]["cells"] for result in results)
    lines += ["", f"Prediction and measurement agree in {agree} of {judged} cells."]
    lines += [f"* {text}" for result in results for text in result["statements"]]
    return lines


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    differs = "" if cell["predicted"] == cell["measured"] else ", **differs**"
    return f"{cell['measured']} ({cell['predicted']}, {format_bytes(max(cell['predicted_bytes'].values()))}{differs})"


def main() -> int:
    """Measure where nothing measured is given, and print the block."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/two-cores.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cap", default="268MiB")
    parser.add_argument("--step", type=Path)
    parser.add_argument("--frontier", type=Path, action="append")
    options = parser.parse_args()
    if options.step:
        step = json.loads(options.step.read_text())
    else:
        step = measured("step", options.config, "--steps", str(options.steps), "--repeats", str(options.rounds))
    if options.frontier:
        frontiers = [json.loads(path.read_text()) for path in options.frontier]
    else:
        grown = [text for option, values in GROWN.items() for value in values for text in (option, str(value))]
        frontiers = [measured("frontier", options.config, "--cap", options.cap, *grown)]
    host = step["machine"]
    gpus = ", ".join(host["gpus"]) or "no GPU"
    print(
        f"Measured on {host['processor']}, {host['cores']} cores, {format_bytes(host['memory_bytes'])}, {gpus}; "
        f"torch {host['torch']}, Python {host['python']}. Not run on a GPU.\n"
        if not host["gpus"]
        else f"Measured on {host['cores']} cores and {gpus}; torch {host['torch']}, Python {host['python']}.\n"
    )
    print("\n".join(step_block(step)))
    print()
    print("\n".join(frontier_block(frontiers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
