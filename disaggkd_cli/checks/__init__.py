"""`disaggkd check`: proofs on the user's own config that loss, heads, vocabulary, masks and wire are right.

    from disaggkd_cli.checks import run_checks

    results = run_checks(config)                      # a list of CheckResult, in the order of CHECKS
    results[0].name, results[0].outcome, results[0].figure, results[0].why
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disaggkd_cli.checks.result import CheckResult
    from disaggkd_cli.checks.run import CHECKS, run_checks

__all__ = ["CHECKS", "CheckResult", "run_checks"]

_HOMES = {"CHECKS": "run", "CheckResult": "result", "run_checks": "run"}


def __getattr__(name: str):
    # Loaded on first use: `checks.command` must be importable without torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
