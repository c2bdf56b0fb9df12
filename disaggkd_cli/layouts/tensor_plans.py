"""transformers' plans of tensor parallelism, read from its configuration classes once (`scripts/tensor_plans.py`)."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tensor_plans.json")


def tensor_plan(model_type: str) -> dict[str, str] | None:
    """Return what transformers cuts in a decoder layer: names of its modules and parameters -> style.

    The plan is empty where transformers cuts nothing in the layers (a plan of the embeddings alone is none), and None
    where the class is not one of transformers' own.
    """
    return _plans().get(model_type)


def shares_parameters(model_type: str) -> bool:
    """Return whether layers of this class share parameters."""
    return model_type in _file()["layers_share_parameters"]


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _plans() -> dict[str, dict[str, str]]:
    return {model_type: entry["layer"] for entry in _file()["plans"] for model_type in entry["model_types"]}
