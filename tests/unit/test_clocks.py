"""Waits are counted by a clock that nobody sets."""

import ast
from pathlib import Path

import disaggkd_cli

SAYS_WHEN = {
    "training/run_directory.py",
    "training/timeline.py",
    "training/trackers/mlflow.py",
    "report/read.py",
}
"""What writes down or reads when something was, for people and trackers, and waits for nothing by it."""


def test_only_records_read_the_wall_clock():
    package = Path(disaggkd_cli.__file__).parent
    for path in sorted(package.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) in ("time.time", "datetime.now", "datetime.datetime.now") for call in calls):
            assert str(path.relative_to(package)) in SAYS_WHEN
