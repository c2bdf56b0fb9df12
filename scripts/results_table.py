"""Put measurements made by this very command on this machine into docs/results.md.

    python scripts/results_table.py [--rounds 3] [--steps 8] [--write] [--only step|frontier]
    python scripts/results_table.py --step STEP.json --frontier FRONTIER.json [--frontier ...] [--write]

The first form makes the models where they are missing and runs `disaggkd bench step` and `disaggkd bench frontier`
(twice: a teacher in a few wide layers, and one pair on more and more ranks). What is measured lies in
runs/results-table, so a call that is cut off goes on when it is made again; one that came to its end measures anew. The
second takes what the benches printed with --json. The block is printed, and with --write also put between the page's
two markers. Claims that do not hold are printed as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from disaggkd_cli import files
from disaggkd_cli.bench.frontier_report import format_agreement
from disaggkd_cli.bench.step_report import peaks_by_role, reasons
from disaggkd_cli.units import format_bytes

KEPT = Path("runs/results-table")
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
MARKERS = ("<!-- results: begin (scripts/results_table.py --write) -->", "<!-- results: end -->")
PAIR, FRONTIER = "configs/two-cores.yaml", "configs/two-cores-frontier.yaml"
CAP = "340MiB"
FRONTIERS = (
    (FRONTIER, "--cap", CAP, "--teacher-widths", "768", "--teacher-widths", "1024", "--teacher-widths", "1280",
     "--vocabularies", "2048", "--vocabularies", "12288", "--vocabularies", "16384",
     "--micro-batches", "16", "--micro-batches", "24", "--micro-batches", "48"),
    (PAIR, "train.micro_batch_sequences=36", "train.accumulation=1", "--cap", CAP,
     "--ranks", "2", "--ranks", "3", "--ranks", "4"),
)  # fmt: skip
TITLES = {
    "colocated_full": "colocated, full logits",
    "colocated_fused": "colocated, fused loss",
    "disaggregated_fused": "disaggregated, fused loss",
}
AXES = {
    "teacher_layers": "layers of the teacher",
    "teacher_width": "hidden size of the teacher",
    "micro_batch_sequences": "sequences a micro-batch",
    "vocabulary": "size of the vocabulary",
    "ranks": "ranks in all, same global batch",
}
VERDICTS = {True: "holds", False: "**does not hold**", None: "cannot be told"}


def measured(name: str, *arguments: str) -> dict[str, Any]:
    """Run `disaggkd bench` with `--json` and return what it printed, or what a call that was cut off had measured."""
    path = KEPT / f"{name}.json"
    if not path.exists():
        command = [sys.executable, "-m", "disaggkd_cli", "bench", *arguments, "--json"]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        KEPT.mkdir(parents=True, exist_ok=True)
        files.write_text(path, printed)
    return json.loads(path.read_text(encoding="utf-8"))


def put_by() -> None:
    """Keep a finished call's measurements apart from those of the next."""
    last = KEPT.with_name(f"{KEPT.name}.last")
    shutil.rmtree(last, ignore_errors=True)
    KEPT.rename(last)


def step_block(result: dict[str, Any]) -> list[str]:
    """Return the lines of the three modes side by side, and the claims."""
    lines = [
        f"`disaggkd bench step {result['config']} --steps {result['steps']} --repeats {result['repeats']}`: "
        f"{result['ranks']} ranks, {result['global_batch_sequences']} sequences of {result['sequence_length']} tokens "
        "a step, median (lowest to highest) of the rounds.",
        "",
        "| mode | tokens/s | step | student waits | teacher idle | peak of the fullest rank in training, above what "
        "Python and its libraries take |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for mode, one in result["modes"].items():
        low, high = one["tokens_per_second_spread"]
        idle = "" if one["idle_share"] is None else f"{one['idle_share']:.0%}"
        waits = f"{one['stall_share']:.0%}" + ("" if one["idle_share"] is not None else " (teacher's forward)")
        lines.append(
            f"| {TITLES[mode]} | {one['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f}) | "
            f"{one['step_seconds']:.3f} s | {waits} | {idle} | {peaks_by_role(one)} |"
        )
    lines += ["", "Where the time of a step goes:", ""]
    lines += [f"* {named(text)}" for text in reasons(result["modes"])]
    lines += ["", "| claim, on this machine | | |", "|---|---|---|"]
    lines += [f"| {named(one['claim'])} | {VERDICTS[one['holds']]} | {one['figures']} |" for one in result["claims"]]
    return lines


def named(text: str) -> str:
    """Return a text with the modes' names as people say them."""
    for mode, title in TITLES.items():
        text = text.replace(mode, title)
    for axis, title in AXES.items():
        text = text.replace(f"({axis})", f"({title})").replace(f"largest {axis} ", f"largest {title} ")
        text = text.replace(f" at {axis} ", f", {title} ")
    return text.replace("fewest ranks that trains", "fewest ranks that train the same global batch")


def frontier_block(results: list[dict[str, Any]]) -> list[str]:
    """Return a line a grown value, with measured and predicted for each mode, and what follows from them."""
    first = results[0]
    baseline = ", ".join(f"{role} {format_bytes(size)}" for role, size in first["baseline_bytes"].items())
    lines = [
        f"`disaggkd bench frontier --cap {format_bytes(first['cap_bytes']).replace(' ', '')}`: real runs in which the "
        f"kernel refuses a rank more memory from its first step on (RLIMIT_DATA, above what a rank takes without a "
        f"model to speak of: {baseline}). How it ended, and in brackets what the planner predicted for the fullest "
        "rank; where prediction and end differ, it says so.",
        "",
        "| grown | " + " | ".join(TITLES.values()) + " |",
        "|---|" + "---|" * len(TITLES),
    ]
    for result in results:
        cells = result["cells"]
        name = Path(result["config"]).stem
        for axis, value in dict.fromkeys((cell["axis"], cell["value"]) for cell in cells):
            row = {cell["mode"]: cell for cell in cells if (cell["axis"], cell["value"]) == (axis, value)}
            told = " | ".join(_cell(row.get(mode)) for mode in TITLES)
            lines.append(f"| {name}, {AXES[axis]}: {value:,} | {told} |")
    lines.append("")
    for result in results:
        changed = f" ({' '.join(result['overrides'])})" if result.get("overrides") else ""
        found = format_agreement(result["agreement"])
        lines.append(f"* `{result['config']}`{changed}: {found}.")
        lines += [f"* {named(text)}" for text in result["statements"]]
    return lines


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    planned = format_bytes(max(cell["predicted_bytes"].values()))
    if cell["predicted"] == cell["measured"]:
        return f"{cell['measured']} ({planned})"
    return f"{cell['measured']} ({planned}, **predicted {cell['predicted']}**)"


def put_into(readme: str, block: str) -> str:
    """Return the page's text with the block between its markers.

    Raises:
        ValueError: it lacks a marker.
    """
    begin, end = (readme.index(marker) for marker in MARKERS)
    return f"{readme[: begin + len(MARKERS[0])]}\n\n{block}\n\n{readme[end:]}"


def block_of(step: dict[str, Any] | None, frontiers: list[dict[str, Any]]) -> str:
    """Return the whole block: the machine, then what was measured."""
    host = (step or frontiers[0])["machine"]
    where = f"Measured on {host['processor']}, {host['cores']} cores, {format_bytes(host['memory_bytes'])}, "
    where += f"{', '.join(host['gpus']) or 'no GPU'}; torch {host['torch']}, Python {host['python']}."
    parts = [where if host["gpus"] else f"{where} Not run on a GPU."]
    parts += ["\n".join(step_block(step))] if step else []
    parts += ["\n".join(frontier_block(frontiers))] if frontiers else []
    return "\n\n".join(parts)


def main() -> int:
    """Measure where nothing measured is given, print the block, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=("step", "frontier"), help="measure this alone")
    parser.add_argument("--step", type=Path)
    parser.add_argument("--frontier", type=Path, action="append")
    parser.add_argument("--write", action="store_true", help="put the block into docs/results.md")
    options = parser.parse_args()
    given = options.step or options.frontier
    if not given:
        subprocess.run([sys.executable, str(Path(__file__).with_name("make_two_core_pair.py"))], check=True,
                       stdout=sys.stderr)  # fmt: skip
    step = json.loads(options.step.read_text()) if options.step else None
    frontiers = [json.loads(path.read_text()) for path in options.frontier or ()]
    if not given and options.only != "frontier":
        step = measured("step", "step", PAIR, "--steps", str(options.steps), "--repeats", str(options.rounds))
    if not given and options.only != "step":
        frontiers = [
            measured(f"frontier{number}", "frontier", *arguments) for number, arguments in enumerate(FRONTIERS, 1)
        ]
    block = block_of(step, frontiers)
    print(block)
    if options.write:
        PAGE.write_text(put_into(PAGE.read_text(encoding="utf-8"), block), encoding="utf-8")
    if not given:
        put_by()
    return 0


if __name__ == "__main__":
    sys.exit(main())
