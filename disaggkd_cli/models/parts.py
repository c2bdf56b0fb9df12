"""Read a model's weights part by part, so that a process never holds more of it at a time than a decoder layer.

Each part goes through transformers' own loader, on a model that has the modules of this part only: weights of the
others have no parameter to go to and stay in their files. So whatever the loader makes of a file (names that changed,
experts that are put together) comes out as it does from a whole model, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.errors import UserError
from disaggkd_cli.models.layers import decoder_layers
from disaggkd_cli.models.load import ModelSource, load_causal_lm
from disaggkd_cli.models.values import DAMAGED, not_finite

PART_BYTES = 64 * 2**20
"""Small units of a model are read together up to this size."""

Part = dict[str, Tensor]
"""Whole parameters and buffers, on the CPU, by the model's names."""


def reads_in_parts(source: ModelSource, model: nn.Module) -> str:
    """Return why the weights of `source` cannot be read part by part, or an empty text where they can.

    Args:
        model: the causal LM without weights.
    """
    if source.gguf_file:
        return "a GGUF file is read whole"
    if source.directory is not None and not any(source.directory.glob("*.safetensors")):
        return "its weights are in no safetensors files"
    layers: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layers.setdefault(id(parameter), set()).add(unit_of(name, decoder_layers(model)[0]))
    shared = any(len(units) > 1 and any(unit[-1].isdigit() for unit in units) for units in layers.values())
    if shared:
        return "its layers share parameters"
    kept = model.state_dict().keys()
    for name, _ in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        if name not in kept and any("." in inner for inner in owner.state_dict()):
            return f"{name} is computed for several units at once"
    return ""


def unit_of(name: str, layers: str) -> str:
    """Return which unit a tensor belongs to: its decoder layer, or the module that holds it.

    Args:
        name: the tensor's.
        layers: the name of the list of decoder layers.
    """
    match = re.match(re.escape(layers) + r"\.\d+(?=\.)", name)
    return match.group() if match else name.rpartition(".")[0]


def units_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of a causal LM's parameters and kept buffers by unit, in order; tied modules are one unit."""
    layers = decoder_layers(model)[0]
    units: dict[str, list[str]] = {}
    owner: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        unit = owner.setdefault(id(tensor), unit_of(name, layers))
        units.setdefault(unit, []).append(name)
    return units


def grouped(model: nn.Module, wanted: Callable[[str], bool], part_bytes: int = PART_BYTES) -> list[list[str]]:
    """Return the names of the wanted tensors in groups of whole units, of `part_bytes` or one unit each."""
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    groups: list[list[str]] = []
    room = 0
    for names in units_of(model).values():
        if not any(map(wanted, names)):
            continue
        size = sum(sizes[name] for name in names)
        if not groups or size > room:
            groups.append([])
            room = part_bytes
        groups[-1] += names
        room -= size
    return groups


def read_parts(
    source: ModelSource,
    model: nn.Module,
    key: str,
    wanted: Callable[[str], bool] = lambda name: True,
    part_bytes: int = PART_BYTES,
) -> Iterator[Part]:
    """Return the weights of `source` part by part, in the dtype of `model`; the parts together have each name once.

    A part is emptied when the next one is asked for. Buffers that no file holds, such as rotary frequencies, come with
    the modules that have them.

    Args:
        source: with safetensors files.
        model: the whole causal LM without weights.
        key: the config key that named it, for messages.
        wanted: units of which it wants no tensor are not read.
        part_bytes: see `grouped`.

    Raises:
        UserError: a file cannot be read, or lacks what it should hold.
    """
    dtype, whole, config = next(model.parameters()).dtype, type(model), model.config
    groups, every = grouped(model, wanted, part_bytes), set(model.state_dict())

    def parts() -> Iterator[Part]:
        told: set[str] = set()
        for names in groups:
            loaded = load_causal_lm(
                source, dtype, key, model_class=_class_with(whole, set(names)), elsewhere=every, config=config
            )  # fmt: skip
            kept = loaded.state_dict()
            part = {name: kept[name] for name in names}
            for name, buffer in loaded.named_buffers():
                owner = loaded.get_submodule(name.rpartition(".")[0])
                if name not in kept and name not in told and not getattr(owner, "_emptied", False):
                    part[name] = buffer
                    told.add(name)
            del loaded, kept
            yield part
            part.clear()  # before the next one is read

    return parts()


def without_values(source: ModelSource, dtype: torch.dtype, key: str) -> nn.Module:
    """Return what `load_causal_lm` would, with its dtypes and settings, but nothing in its tensors (device `meta`).

    Raises:
        UserError: as `load_causal_lm`; but what lies in the tensors of the files is not looked at.
    """
    return load_causal_lm(source, dtype, key, device_map="meta")


def inside(parts: Iterator[Part], prefix: str) -> Iterator[Part]:
    """Yield what the parts hold of the submodule whose names begin with `prefix`, by its own names."""
    for part in parts:
        yield {name.removeprefix(prefix): tensor for name, tensor in part.items() if name.startswith(prefix)}


def verified(parts: Iterator[Part], model: nn.Module, name: str) -> Iterator[Part]:
    """Pass parts on, and refuse weights that cannot be those of a trained model (see `verify_logits`).

    Args:
        model: the causal LM that the parts are named after.
        name: what messages call it.

    Raises:
        UserError: naming a tensor that holds NaN or infinities, or an embedding or a head of nothing but zeros.
    """
    ends = {id(one.weight) for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None}
    names = {key for key, tensor in model.named_parameters(remove_duplicate=False) if id(tensor) in ends}
    parameters = model.state_dict().keys()
    for part in parts:
        for key, tensor in part.items():
            if key not in parameters or not tensor.is_floating_point():
                continue
            if not torch.isfinite(tensor).all():
                raise UserError(f"{name}: its logits are not finite numbers: {not_finite(key, tensor)}; {DAMAGED}")
            if key in names and not tensor.any():
                raise UserError(
                    f"{name}: {key} {tuple(tensor.shape)} holds nothing but zeros, so there is nothing to learn from "
                    "it; its files are not those of a trained model"
                )
        yield part


def _class_with(whole: Any, names: set[str]) -> Any:
    """Return a subclass of `whole` whose modules have no weights but those of `names`."""

    class OnePart(whole):
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            for path, module in self.named_modules():
                prefix = f"{path}." if path else ""
                lacking = [name for name in module.state_dict() if prefix + name not in names]
                if lacking:  # also where only a submodule lacks them: some classes draw those from above
                    _empty(module, [name for name in lacking if "." not in name])
            tied = self.all_tied_weights_keys
            self.all_tied_weights_keys = {one: other for one, other in tied.items() if {one, other} <= names}

    # The loader looks a class's renamings up by these.
    OnePart.__name__, OnePart.__qualname__, OnePart.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return OnePart


def _empty(module: nn.Module, tensors: list[str]) -> None:
    """Take a module's own `tensors` away, and have the loader leave the module as it is."""
    module._is_hf_initialized = module._emptied = True
    for name in tensors:
        (module._parameters if name in module._parameters else module._buffers)[name] = None
