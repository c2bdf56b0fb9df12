"""Write the student as a Hugging Face model directory that `from_pretrained` loads, checked by loading it again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from disaggkd_cli import files
from disaggkd_cli.errors import RunError
from disaggkd_cli.models.lora import has_adapters, merged_state, save_adapters


def export_student(model: nn.Module, tokenizer: Any, directory: Path, dtype: torch.dtype) -> None:
    """Gather the student on rank 0 and write it, written aside and renamed. Collective over all student ranks.

    Args:
        model: the (sharded) causal LM.
        tokenizer: saved beside it.
        directory: where to; replaced when it exists.
        dtype: of the weights on disk.

    Raises:
        RunError: when it cannot be written, or does not load back to the same weights.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() != 0:
        return
    try:
        with files.replacing(directory) as aside:
            plain = merged_state(model, state) if has_adapters(model) else state
            whole = _whole_model(model, plain, dtype)
            whole.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            _compare(whole, aside)
            if has_adapters(model):
                save_adapters(model, state, aside / "adapters")
    except OSError as error:
        raise RunError(f"the student could not be written to {directory}: {error}") from error


def _whole_model(model: nn.Module, state: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    whole.to_empty(device="cpu")
    _copy_buffers(model, whole)
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    whole.load_state_dict(state, strict=True, assign=True)
    whole.tie_weights()
    whole.generation_config = copy.deepcopy(model.generation_config)
    return whole.eval()


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Fill buffers that no state dict holds, such as rotary frequencies, which `to_empty` left undefined."""
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def _compare(whole: nn.Module, directory: Path) -> None:
    again, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=next(whole.parameters()).dtype, output_loading_info=True
    )
    read = again.state_dict()
    differing = [name for name, tensor in whole.state_dict().items() if not torch.equal(read[name], tensor)]
    if info["missing_keys"] or differing:
        names = ", ".join([*sorted(info["missing_keys"]), *differing][:3])
        raise RunError(f"the student written to {directory} does not load back to the same weights: {names}")
