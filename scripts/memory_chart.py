"""Draw the memory of one rank as `plan` counts it, by component, in each mode: full logits, fused, disaggregated.

python scripts/memory_chart.py            # docs/memory.svg, of configs/qwen3.5-35b-a3b-to-9b.yaml
python scripts/memory_chart.py --check    # 1 when the picture is not what `plan` says now
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from disaggkd_cli.config import load
from disaggkd_cli.planner.colours import COMPONENT_COLOURS, family
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import RankMemory
from disaggkd_cli.planner.plan import Plan, make_plan
from disaggkd_cli.planner.report_text import TITLES

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "qwen3.5-35b-a3b-to-9b.yaml"
PICTURE = ROOT / "docs" / "memory.svg"

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 860, 250, 70, 88, 40, 24
GIB = 2**30


def picture(plan: Plan) -> str:
    """Return the SVG: a bar a kind of rank, in its fullest phase, with the memory that can be used marked."""
    bars = [(one, role, rank) for one in plan.modes.values() for role, rank in one.ranks.items()]
    widest = max(max(rank.peak_bytes, one.usable[role].value) for one, role, rank in bars)
    scale = (WIDTH - LEFT - RIGHT) / widest
    parts, used = [], {}
    for index, (one, role, rank) in enumerate(bars):
        y, limit = TOP + index * ROW, one.usable[role].value
        fits = rank.peak_bytes <= limit
        parts.append(_text(LEFT - 10, y + 11, TITLES[one.mode], "end", 13))
        parts.append(_text(LEFT - 10, y + 25, f"{role} rank, in {rank.binding.name}", "end", 11, "#6b7785"))
        x = float(LEFT)
        for name, size in _families(rank):
            used[name] = None
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" fill="{COMPONENT_COLOURS[name]}">'
                f"<title>{escape(name)}: {size / GIB:.1f} GiB</title></rect>"
            )
            x += size * scale
        colour = "#1c2530" if fits else "#b3352f"
        parts.append(_text(x + 6, y + 17, f"{rank.peak_bytes / GIB:.1f} GiB", "start", 13, colour))
        edge = LEFT + limit * scale
        parts.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{y - 6}" y2="{y + BAR + 6}" class="limit"/>')
    work, cluster = plan.work, plan.work.cluster
    height = TOP + len(bars) * ROW + 52
    title = f"{work.teacher.name} → {work.student.name}: memory of one rank, as planned"
    usable = bars[0][0].usable[bars[0][1]].value / GIB
    ranks = f"{work.student_ranks} student and {work.teacher_ranks} teacher ranks"
    facts = f"{cluster.student_gpu.name}, {ranks}, a micro-batch of {work.micro_batch_tokens:,} tokens"
    note = f"counted by disaggkd plan, not measured; dashed: the {usable:.1f} GiB that can be used"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif">'
        "<style>.limit { stroke: #1c2530; stroke-width: 1.5; stroke-dasharray: 5 3; }</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f"{_text(16, 26, title, 'start', 16)}\n{_text(16, 46, facts, 'start', 12, '#6b7785')}\n"
        f"{_text(16, 63, note, 'start', 12, '#6b7785')}\n"
        + "\n".join(parts)
        + _legend([name for name in COMPONENT_COLOURS if name in used], height - 22)
        + "\n</svg>\n"
    )


def _families(rank: RankMemory) -> list[tuple[str, float]]:
    sums = dict.fromkeys(COMPONENT_COLOURS, 0.0)
    for term in rank.binding.terms:
        sums[family(term.name)] += max(0.0, term.value)
    return [(name, size) for name, size in sums.items() if size > 0]


def _legend(names: list[str], y: int) -> str:
    x, parts = 16.0, []
    for name in names:
        parts.append(f'\n<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{COMPONENT_COLOURS[name]}"/>')
        parts.append(_text(x + 16, y, name, "start", 12))
        x += 34 + 6.4 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, size: int, colour: str = "#1c2530") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def main() -> int:
    """Write the picture, or compare it."""
    drawn = picture(make_plan(workload_of(load(CONFIG))))
    if "--check" in sys.argv[1:]:
        same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn
        if not same:
            print(f"{PICTURE.relative_to(ROOT)} is out of date: run python scripts/memory_chart.py")
        return 0 if same else 1
    PICTURE.write_text(drawn, encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
