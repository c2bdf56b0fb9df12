"""The tables of docs/planner.md, written in place between their markers; published rows are printed as well.

python scripts/planner_tables.py            # parameter counts, published rows, the reference plans
python scripts/planner_tables.py --check    # 1 when the document is out of date
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from disaggkd_cli.config import load
from disaggkd_cli.losses.divergences import DIVERGENCES, divergence_named
from disaggkd_cli.planner.constants import CONSTANTS, ERROR_BANDS, NOT_MODELLED, OTHER_FULL_LOGITS
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.models import load_preset, preset_names, resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.plan import make_plan
from disaggkd_cli.planner.published import ROWS, predict_gib
from disaggkd_cli.planner.published_rates import predict_rate, published_rates
from disaggkd_cli.planner.report_text import TITLES, print_verdict

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "planner.md"
PLANS = (
    ("qwen3.5-35b-a3b-to-9b", "H100-SXM", None),
    ("qwen3.5-35b-a3b-to-9b", "H200-SXM", None),
    ("qwen3-235b-a22b-to-8b", "H100-SXM", None),
    ("qwen3-235b-a22b-to-8b", "H100-SXM", 16),
    ("qwen3.5-397b-a17b-to-35b-a3b", "H200-SXM", None),
    ("qwen3.5-397b-a17b-to-35b-a3b", "H200-SXM", 16),
)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def presets() -> str:
    """Parameter counts of all presets, and their sources."""
    rows = []
    for name in preset_names():
        counted = count_parameters(resolve_model(name, name))
        active = f"{counted.active:,}" if counted.active != counted.total else "all"
        rows.append([name, f"{counted.total:,}", active, load_preset(name)["source"]])
    return table(["preset", "parameters", "active", "source of its shape"], rows)


def published() -> str:
    """Published memory figures and the closed form."""
    rows = []
    for row in ROWS:
        predicted = predict_gib(row)
        error = f"{predicted / row.measured_gib - 1:+.1%}"
        rows.append([row.name, row.model, f"{row.measured_gib:.2f}", f"{predicted:.2f}", error, f"±{row.band:.0%}"])
    return table(["row", "model", "measured GiB", "closed form GiB", "error", "band"], rows)


def rates() -> str:
    """Published training rates and the closed form, and whether the row was in the fit."""
    rows = []
    for row in published_rates():
        predicted = predict_rate(row)
        half = "held out" if row.held_out else "fit"
        figures = [
            f"{row.tokens_per_second:,.0f}",
            f"{predicted:,.0f}",
            f"{predicted / row.tokens_per_second - 1:+.1%}",
        ]
        rows.append([row.source, row.name, row.gpu, *figures, half])
    return table(["source", "run", "GPU", "published tokens/s", "closed form", "error", "half"], rows)


def achieved() -> str:
    """What kernels achieve, as fitted."""
    rows = [
        [
            name,
            f"{one.matmul:.0%}",
            f"{one.attention:.0%}",
            f"{one.half_length:,.0f}" if one.half_length else "none",
            f"{one.pointwise:g}",
        ]
        for name, one in KERNELS.rates.items()
    ]
    head = ["architecture", "matrix products", "attention", "half of it at length", "traffic per saved byte and pass"]
    shared = (
        f"Of matrix products, routed experts reach {KERNELS.experts:.0%} and delta nets {KERNELS.delta_net:.0%} "
        f"(assumed); `torch.compile` leaves {KERNELS.compiled:.0%} of the memory traffic; "
        f"{KERNELS.exposed:.0%} of the shorter of compute and collectives is not hidden; "
        f"float8 products (published rows only) are {KERNELS.float8:g} times as fast."
    )
    return f"{table(head, rows)}\n\n{shared}"


def plans() -> str:
    """The plans of the reference configs, all modes."""
    rows = []
    for name, gpu, gpus in PLANS:
        plan = make_plan(workload_of(load(ROOT / "configs" / f"{name}.yaml"), gpu, gpus), gpus, with_knobs=False)
        for mode, one in plan.modes.items():
            apart = mode == "disaggregated_fused"
            counts = f"{one.work.student_ranks} + {one.work.teacher_ranks}" if apart else f"{one.gpus}"
            peak = ", ".join(f"{role} {memory.peak_bytes / 2**30:.1f}" for role, memory in one.ranks.items())
            allowed = next(iter(one.usable.values())).value / 2**30
            speed = f"{one.timing.tokens_per_second:,.0f}" if one.fits else "does not fit"
            largest = f"{one.max_micro_batch_tokens:,}" if one.max_micro_batch_tokens else "none"
            mark = " ←" if mode == plan.verdict.mode else ""
            where = f"{gpu}, --gpus {gpus}" if gpus else gpu
            rows.append([f"{name}, {where}", TITLES[mode] + mark, counts, f"{peak} of {allowed:.1f}", speed, largest])
    head = ["config", "mode", "GPUs", "peak GiB a rank of usable", "tokens/s", "largest micro-batch"]
    return table(head, rows)


def verdict() -> str:
    """What the plan of the reference pair says first, as a terminal of 96 columns shows it."""
    console = Console(file=io.StringIO(), width=96)
    print_verdict(make_plan(workload_of(load(ROOT / "configs" / "qwen3.5-35b-a3b-to-9b.yaml"))), console)
    lines = [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]
    return "\n".join(["```", *lines, "```"])


def losses() -> str:
    """Bytes a row and vocabulary entry of full-logits losses."""
    ours = [
        [f"ours, `implementation: full`, {kind}", f"{divergence_named(kind).full_logits_bytes:g}", "MemTracker; tested"]
        for kind in DIVERGENCES
    ]
    others = [[name, f"{value:g}", source] for name, (value, source) in OTHER_FULL_LOGITS.items()]
    return table(["loss over full logits", "bytes per row × vocabulary", "source"], [*ours, *others])


def constants() -> str:
    """Every constant with its provenance."""
    return table(
        ["constant", "value", "kind", "source"],
        [[f"`{name}`", f"{one.value:g} {one.unit}", one.kind, one.source] for name, one in CONSTANTS.items()],
    )


def bands() -> str:
    """Error bands, and what is not modelled."""
    lines = [f"* {name}: {band}" for name, band in ERROR_BANDS.items()]
    return "\n".join([*lines, "", "Not modelled:", "", *(f"* {text}" for text in NOT_MODELLED)])


BLOCKS = {
    "presets": presets,
    "published": published,
    "rates": rates,
    "achieved": achieved,
    "plans": plans,
    "verdict": verdict,
    "losses": losses,
    "constants": constants,
    "bands": bands,
}


def filled(text: str) -> str:
    """The document with every block written anew."""
    for name, build in BLOCKS.items():
        pattern = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, made=build(): f"{match[1]}\n{made}\n\n{match[2]}", text)
        if count != 1:
            raise SystemExit(f"{DOCUMENT} has {count} blocks named {name}")
    return text


def main(arguments: list[str]) -> int:
    """Write the tables, or check that they are as they would be written."""
    present = DOCUMENT.read_text(encoding="utf-8")
    wanted = filled(present)
    if "--check" in arguments:
        return 0 if wanted == present else 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    print(published(), rates(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
