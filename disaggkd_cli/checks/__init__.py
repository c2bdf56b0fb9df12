"""`disaggkd check`: proofs on the user's own config that loss, heads, vocabulary, masks and wire are right.

`run_checks(config)` returns a list of `CheckResult` (name, outcome, figure, why), in the order of `CHECKS`.
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
