"""docs/planner.md holds what its commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_tables_of_the_document_are_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "planner_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, f"run `python scripts/planner_tables.py`\n{done.stderr}"
