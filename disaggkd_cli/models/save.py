"""Write a model and its tokenizer as a directory that `from_pretrained` reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def save_model_directory(model: nn.Module, tokenizer: Any, directory: Path) -> int:
    """Write a causal LM and a tokenizer, and return the model's number of parameters.

    Args:
        model: a transformers model.
        tokenizer: one, or the directory of a model whose tokenizer files are copied.
        directory: made if it is not there.
    """
    model.save_pretrained(directory)
    if isinstance(tokenizer, Path):
        for name in _TOKENIZER_FILES:
            shutil.copy(tokenizer / name, directory / name)
    else:
        tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
