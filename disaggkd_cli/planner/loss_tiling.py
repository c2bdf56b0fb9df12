"""The fused loss's own cost model, reached without importing torch: the package around it imports torch, the module
does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _load() -> ModuleType:
    loaded = sys.modules.get("disaggkd_cli.losses.tiling")
    if loaded is not None:
        return loaded
    name = "disaggkd_cli.planner._loss_tiling"
    path = Path(__file__).resolve().parent.parent / "losses" / "tiling.py"
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


_tiling = _load()
LossShape = _tiling.LossShape
choose_tiling = _tiling.choose_tiling
