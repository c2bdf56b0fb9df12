"""Pairs of models that `bench frontier` grows: random weights, the config's shapes with one thing changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError

_TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}


def read_shapes(config: Config) -> dict[str, dict[str, Any]]:
    """Return the fields of both models' config.json, by side.

    Raises:
        UserError: a model is no local directory with a config.json.
    """
    shapes = {}
    for side, name in (("teacher", config.teacher.model), ("student", config.student.model or "")):
        path = Path(name).expanduser() / "config.json"
        try:
            shapes[side] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{side}.model: {path} cannot be read ({error}); name a local model directory") from None
    return shapes


def grown(shape: dict[str, Any], side: str, axis: str, value: int) -> dict[str, Any]:
    """Return a model's fields with one axis at a value; axes that are no part of a model change nothing.

    A wider teacher keeps the size of its attention heads and its proportions.

    Raises:
        UserError: a width that is no multiple of the heads' size.
    """
    if axis == "vocabulary":
        return {**shape, "vocab_size": value}
    if side == "student" or axis not in ("teacher_layers", "teacher_width"):
        return dict(shape)
    if axis == "teacher_layers":
        return {**shape, "num_hidden_layers": value}
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    size = shape.get("head_dim") or width // heads
    if value % size:
        raise UserError(f"--teacher-widths {value}: must be a multiple of the size of an attention head, {size}")
    return {
        **shape,
        "hidden_size": value,
        "intermediate_size": shape["intermediate_size"] * value // width,
        "num_attention_heads": value // size,
        "num_key_value_heads": _divisor_near(value // size, shape.get("num_key_value_heads", heads) * value / width),
    }


def _divisor_near(whole: int, wanted: float) -> int:
    return min((one for one in range(1, whole + 1) if whole % one == 0), key=lambda one: abs(one - wanted))


class Pairs:
    """Makes model directories below `root`, one pair at a time; a tokenizer's files are copied beside each.

    Files are in another dtype than the teacher computes in, so that loading copies the weights. Of the same dtype they
    would stay mapped from the file, its head included, and a limit on memory would count what no GPU holds.
    """

    def __init__(self, root: Path, tokenizer: Path, shapes: dict[str, dict[str, Any]], teacher_dtype: str) -> None:
        self._root = root
        self._saved_dtype = "bfloat16" if teacher_dtype == "float32" else "float32"
        self._tokenizer = tokenizer
        self._shapes = shapes
        self._made: dict[str, dict[str, Any]] = {}

    def pair(self, axis: str = "", value: int = 0) -> list[str]:
        """Return the overrides that name the pair with `axis` at `value`; what lies there already is not made again."""
        return self._lay({side: grown(shape, side, axis, value) for side, shape in self._shapes.items()})

    def smallest(self) -> list[str]:
        """Return the overrides that name a pair of next to nothing."""
        return self._lay({side: {**shape, **_TINY, "vocab_size": 2048} for side, shape in self._shapes.items()})

    def _lay(self, wanted: dict[str, dict[str, Any]]) -> list[str]:
        for side, fields in wanted.items():
            directory = self._root / side
            if self._made.get(side) != fields:
                shutil.rmtree(directory, ignore_errors=True)
                self._make(fields, directory)
                self._made[side] = fields
        return [f"{side}.model={self._root / side}" for side in wanted]

    def _make(self, fields: dict[str, Any], directory: Path) -> None:
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        from disaggkd_cli.models.save import save_model_directory

        transformers.utils.logging.disable_progress_bar()

        fields = {key: value for key, value in fields.items() if key not in ("dtype", "torch_dtype", "architectures")}
        fields.pop("layer_types", None)
        torch.manual_seed(0)
        model_type = fields.pop("model_type")
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **fields), dtype=getattr(torch, self._saved_dtype)
        )
        save_model_directory(model, Path(self._tokenizer), directory)
