"""A student cut out of its teacher: the same embeddings and head, and some of the teacher's decoder layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from disaggkd_cli.config.layers import layer_numbers
from disaggkd_cli.errors import UserError

_LISTS_OF_LAYER_NUMBERS = {"mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices"}


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a causal LM's decoder layers.

    Raises:
        UserError: when no list of `num_hidden_layers` modules is found.
    """
    count = model.config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise UserError(f"{type(model).__name__} has no list of {count} decoder layers")
    return min(found, key=lambda pair: pair[0].count("."))


def student_from_layers(teacher: nn.Module, layers: str | list[int], dtype: torch.dtype) -> nn.Module:
    """Return a new model of the teacher's class with copies of its embeddings, head and the named layers.

    Raises:
        UserError: when the layers do not exist, or the family's configuration cannot describe such a choice.
    """
    kept = kept_layers(teacher, layers)
    student = AutoModelForCausalLM.from_config(config_of_layers(teacher, kept), dtype=dtype)
    whole = teacher.state_dict()
    state = {own: whole[name] for name, own in names_in_student(teacher, kept).items()}
    try:
        student.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise cannot_be_cut(teacher, kept, str(error).splitlines()[-1].strip()) from None
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


def kept_layers(teacher: nn.Module, layers: str | list[int]) -> list[int]:
    """Return the numbers of the teacher's layers that `student.from_teacher.layers` names."""
    return layer_numbers(layers, teacher.config.get_text_config().num_hidden_layers)


def config_of_layers(teacher: nn.Module, kept: list[int]) -> Any:
    """Return the configuration of a student of these layers."""
    return config_with_layers(teacher.config, kept, teacher.config.get_text_config().num_hidden_layers)


def names_in_student(teacher: nn.Module, kept: list[int], names: Iterable[str] | None = None) -> dict[str, str]:
    """Return, by the teacher's names of tensors that such a student has, its own names of them.

    Args:
        teacher: a causal LM, which may have no weights.
        kept: numbers of the layers, in the student's order.
        names: of the teacher's tensors; by default those of its state dict.
    """
    prefix = decoder_layers(teacher)[0] + "."
    found = {}
    for name in teacher.state_dict() if names is None else names:
        match = re.match(re.escape(prefix) + r"(\d+)\.(.*)", name)
        if match is None:
            found[name] = name
        elif int(match.group(1)) in kept:
            found[name] = f"{prefix}{kept.index(int(match.group(1)))}.{match.group(2)}"
    return found


def cannot_be_cut(teacher: nn.Module, kept: list[int], why: str) -> UserError:
    """Return the error of a teacher whose layers differ in a way that its configuration cannot describe."""
    return UserError(
        f"student.from_teacher.layers: {type(teacher).__name__} cannot be cut to layers {kept}: its layers are of "
        f"different shapes and its configuration cannot say so ({why})"
    )


def config_with_layers(config: Any, kept: list[int], count: int) -> Any:
    """Return a copy of the configuration whose per-layer lists and counts describe the kept layers."""
    new = copy.deepcopy(config)
    text = new.get_text_config()
    for name, value in list(vars(text).items()):
        if name in _LISTS_OF_LAYER_NUMBERS and value:
            setattr(text, name, [kept.index(number) for number in value if number in kept])
        elif isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, name, type(value)(value[number] for number in kept))
        elif name == "first_k_dense_replace" and value:
            text.first_k_dense_replace = sum(number < value for number in kept)
        elif name == "max_window_layers" and isinstance(value, int):
            text.max_window_layers = sum(number < value for number in kept)
    text.num_hidden_layers = len(kept)
    return new
