"""The table of model families in docs/models.md, written in place between its markers.

python scripts/model_families.py            # proves every family on a tiny random model and writes the table
python scripts/model_families.py --check    # 1 when the document is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = ["family", "transformers class", "head verified", "packed", "teacher", "student", "fused = full", "exported"]


def table() -> str:
    """Prove every family and return the Markdown table."""
    sys.path.insert(0, str(ROOT))
    from tests.support.families import TOLERANCE, family_row
    from tests.support.models import ALL_FAMILIES

    def mark(true: bool) -> str:
        return "yes" if true else "NO"

    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for family in sorted(ALL_FAMILIES):
        row = family_row(family)
        cells = [
            f"`{row.family}`",
            f"`{row.model_class}`",
            f"yes: {row.head}" if row.head else "yes",
            "yes" if row.packs and not row.leaks else "no: one document per row",
            mark(row.teacher),
            "yes, cut too" if row.cut.startswith("layers") else "yes, uncut only",
            mark(row.fused_error < TOLERANCE and row.sharded_error < TOLERANCE),
            mark(row.exported),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the document's text with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    old = DOCUMENT.read_text(encoding="utf-8")
    new = written(old)
    if "--check" in sys.argv[1:]:
        print("up to date" if new == old else f"{DOCUMENT} is out of date; run python scripts/model_families.py")
        return int(new != old)
    DOCUMENT.write_text(new, encoding="utf-8")
    print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
