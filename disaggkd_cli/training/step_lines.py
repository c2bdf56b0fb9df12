"""Files of one JSON object a line, each with the step that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_step_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are objects with a step, and how many others there are; none of a file that is not there.

    What a kill cut off in mid-write is none of the others: it belongs to a step that is done again.
    """
    if not path.exists():
        return [], 0
    lines, others = [], 0
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and type(line.get("step")) is int:
            lines.append(line)
        elif text.strip() and number < len(texts):  # behind the last line end stands what was cut off
            others += 1
    return lines, others
