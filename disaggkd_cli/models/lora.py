"""Low-rank adapters in a student (peft, an optional extra): they are trained, the base stays frozen.

The adapters are put into the model in place, so the model keeps its class and everything that is proved on it. They end
in two forms: merged into plain weights, which any tool loads, and apart, as peft's own directory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from disaggkd_cli.errors import UserError

_DOWN, _UP, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
_LANGUAGE_MODEL = "base_model.model."
_PLAIN = "plain"


def add_adapters(model: nn.Module, settings: Any, seed: int) -> list[str]:
    """Put adapters into `model`, freeze everything else, and return the names of the adapted modules.

    Args:
        model: a causal LM.
        settings: the `student.lora` section: rank, alpha, targets, dropout.
        seed: of the adapters' first weights, so that every rank draws the same ones.

    Raises:
        UserError: peft is not installed, no module has such a name, or the head is among the targets.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise UserError("student.lora: needs peft; `pip install 'disaggkd[lora]'`") from None
    torch.manual_seed(seed)
    everywhere = settings.targets == "all-linear"
    targets = _all_linear(model) if everywhere else settings.targets
    try:
        config = _peft_config(settings.rank, settings.alpha, targets, settings.dropout)
        # Where peft sees a model's configuration, it extends names of matrices to the experts' fused ones.
        inject_adapter_in_model(config, nn.ModuleDict({_PLAIN: model}) if everywhere else model)
    except ValueError as error:
        raise UserError(f"student.lora.targets: {' '.join(str(error).split())}") from None
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    if any(module is head for module in map(model.get_submodule, names)):
        raise UserError("student.lora.targets: the LM head cannot have an adapter, since the loss reads its own weight")
    odd = [name for name in names if not hasattr(model.get_submodule(name).get_base_layer(), "weight")]
    if odd:
        raise UserError(
            f"student.lora.targets: {settings.targets} reaches {odd[0]}, where the matrices of all experts lie in one "
            "tensor, and such adapters cannot be merged; name matrices outside of the experts, or all-linear"
        )
    return names


def _all_linear(model: nn.Module) -> str:
    """Return a pattern of the names of all linear modules but the head, in a dictionary that holds the model."""
    head = model.get_output_embeddings()
    linear = (nn.Linear, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, linear) and module is not head]
    return "|".join(re.escape(f"{_PLAIN}.{name}") for name in names)


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` was called on this model."""
    return any(hasattr(module, "lora_A") for module in model.modules())


def plain_name(name: str) -> str:
    """Return the name that a base tensor of an adapted model has without its adapter."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Whether a tensor of an adapted model is an adapter's own."""
    return name.endswith((_DOWN, _UP))


def merged_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of an adapted model, or of some modules, with `W + scaling · B A` under the plain names.

    Args:
        model: the adapted model (its parameters may be sharded; only its modules' settings are read).
        state: its gathered state dict.
    """
    merged = {
        plain_name(name): tensor for name, tensor in state.items() if not is_adapter(name)
    }  # fmt: skip
    for name in [name.removesuffix(_DOWN) for name in state if name.endswith(_DOWN)]:
        module = model.get_submodule(name)
        change = module.scaling["default"] * (state[name + _UP].float() @ state[name + _DOWN].float())
        change = change.T if getattr(module, "fan_in_fan_out", False) else change
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight.float() + change).to(weight.dtype)
    return merged


def save_adapters(model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    """Write the adapters alone, as `PeftModel.from_pretrained(base_model, directory)` reads them.

    Args:
        model: the adapted model.
        state: its gathered state dict.
        directory: made if it is not there.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    adapters = {
        _LANGUAGE_MODEL + name.replace(".default.", "."): tensor.contiguous()
        for name, tensor in state.items()
        if is_adapter(name)
    }
    save_file(adapters, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    first = next(iter(adapted.values()))
    config = _peft_config(first.r["default"], first.lora_alpha["default"], list(adapted), 0.0)
    config.base_model_name_or_path = model.config.name_or_path or None
    config.inference_mode = True
    config.save_pretrained(directory)


def _peft_config(rank: int, alpha: float, targets: str | list[str], dropout: float) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
