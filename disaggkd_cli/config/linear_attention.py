"""Models with linear attention want kernels of a package on GPUs: what to say where it is not installed.

Without it transformers computes a gated delta rule in plain torch: some 35,000 kernel launches in a forward of a model
of 30 such layers, and float32 tensors of 512 MiB at 8,192 positions (counted from its source in transformers 5.24).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from disaggkd_cli.config.schema import Config

_PACKAGE, _MODULE = "flash-linear-attention", "fla"
_SIGNS = ("linear_num_key_heads", "linear_num_value_heads", "linear_attn_config")
"""Keys of a config.json that only models with linear attention have; `layer_types` is left out of many files."""


def has_linear_attention(fields: Mapping[str, Any]) -> bool:
    """Whether a model has layers of linear attention (gated delta nets and their like), by its config.json."""
    text = fields.get("text_config") or fields
    return "linear_attention" in (text.get("layer_types") or ()) or any(text.get(name) for name in _SIGNS)


def missing_kernels(config: Config, fields_of: Callable[[str], Mapping[str, Any] | None]) -> list[str]:
    """Return one line that names the package to install for this run's models on a GPU, or none.

    Args:
        config: the run.
        fields_of: from a model's name to the fields of its config.json, None where they are not known.
    """
    if find_spec(_MODULE) is not None:
        return []
    student, teacher = config.student, config.teacher
    sides = {} if teacher.cache else {"teacher.model": teacher.model}
    sides["the student"] = student.model or student.from_config or (teacher.model if student.from_teacher else None)
    slow = [key for key, model in sides.items() if model and has_linear_attention(fields_of(model) or {})]
    if not slow:
        return []
    return [
        f"{' and '.join(slow)}: linear attention, but {_PACKAGE} is not installed here; without it a GPU computes such "
        "layers in plain torch, tens of thousands of small kernels a forward: `pip install 'disaggkd[gpu]'`"
    ]
