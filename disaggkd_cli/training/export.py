"""Write the student as a Hugging Face model directory that `from_pretrained` loads, checked by loading it again."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from disaggkd_cli import files
from disaggkd_cli.errors import RunError
from disaggkd_cli.models.lora import has_adapters, merged_state, save_adapters


def export_student(model: nn.Module, tokenizer: Any, directory: Path, dtype: torch.dtype, card: str = "") -> None:
    """Gather the student on rank 0 and write it (see `write_student`). Collective over all student ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        write_student(model, state, tokenizer, directory, dtype, card)


def write_student(
    model: nn.Module, state: dict[str, Tensor], tokenizer: Any, directory: Path, dtype: torch.dtype, card: str = ""
) -> None:
    """Write the student as a model directory, aside and then renamed, after loading it back from there.

    Args:
        model: the causal LM; where it is sharded only its configuration and buffers are read.
        state: its whole state dict, on the CPU.
        tokenizer: saved beside it.
        directory: where to; replaced when it exists.
        dtype: of the weights on disk.
        card: what becomes `README.md`; empty writes none.

    Raises:
        RunError: when it cannot be written, or does not load back to the same weights.
    """
    try:
        with files.replacing(directory) as aside:
            plain = merged_state(model, state) if has_adapters(model) else state
            whole = _whole_model(model, plain, dtype)
            whole.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            _compare(whole, aside)
            if has_adapters(model):
                save_adapters(model, state, aside / "adapters")
            if card:
                (aside / "README.md").write_text(card, encoding="utf-8")
            _modes_by_umask(aside)
    except OSError as error:
        raise RunError(f"the student could not be written to {directory}: {error}") from error


def _modes_by_umask(directory: Path) -> None:
    """Give each file the mode that any new file here gets; safetensors makes files that only their owner reads."""
    umask = os.umask(0)
    os.umask(umask)
    for path in directory.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _whole_model(model: nn.Module, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(model.config)
    config.name_or_path = ""  # it is no copy of what it began as, and a path of this machine is nobody's business
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
