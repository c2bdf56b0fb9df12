"""May several documents share a row? Only where attention keeps them apart: decided by layer type, then proved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.head import hidden_states
from disaggkd_cli.models.load import load_config, resolve_source
from disaggkd_cli.models.student import student_source_config

_LAYERS_THAT_SEPARATE = {"full_attention", "sliding_attention", "chunked_attention"}
_FAMILIES_WITHOUT_POSITION_RESTART = {"gpt2", "gpt_neo", "opt", "bloom", "mpt", "mamba", "mamba2", "rwkv", "falcon_h1"}


def packs_documents(model_config: Any) -> tuple[bool, str]:
    """Return whether a model keeps packed documents apart by its kind, and why (not).

    Restarting position ids mark the documents; attention layers honour them, recurrent layers (gated delta net, Mamba)
    carry their state across unless special kernels are given the boundaries.
    """
    text = model_config.get_text_config()
    recurrent = sorted(set(getattr(text, "layer_types", None) or []) - _LAYERS_THAT_SEPARATE)
    if recurrent:
        return False, f"{text.model_type} has {', '.join(recurrent)} layers, which carry state across documents"
    if text.model_type in _FAMILIES_WITHOUT_POSITION_RESTART:
        return False, f"{text.model_type} does not separate documents by their positions"
    return True, f"{text.model_type} separates documents by their positions"


def decide_packing(config: Config) -> tuple[bool, str]:
    """Return whether a run packs documents into rows, and why (not), from `data.packing` and both models' kinds.

    Every role decides it from the config alone, so that all agree without asking each other.

    Raises:
        UserError: when a model's configuration cannot be read.
    """
    if config.data.packing != "auto":
        return config.data.packing == "on", f"data.packing={config.data.packing}"
    teacher = resolve_source(config.teacher.model, trust_remote_code=config.teacher.trust_remote_code)
    for model_config in (load_config(teacher, "teacher.model"), student_source_config(config)):
        packs, reason = packs_documents(model_config)
        if not packs:
            return False, reason
    return True, reason


@torch.no_grad()
def verify_packing(backbone: nn.Module, vocabulary: int, name: str) -> float:
    """Check that a packed row gives each document the hidden states that it has alone; return the largest difference.

    The backbone is expected in eval mode and is left as it is.

    Raises:
        UserError: when the documents see each other.
    """
    device = next(backbone.parameters()).device
    lengths = (5, 8, 3)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, min(vocabulary, 1000), (1, sum(lengths)), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    packed = hidden_states(backbone, input_ids, positions)[0].float()
    start, worst = 0, 0.0
    for length in lengths:
        part = slice(start, start + length)
        alone = hidden_states(backbone, input_ids[:, part], positions[:, part])[0].float()
        scale = alone.abs().max().clamp_min(1e-12)
        worst = max(worst, ((packed[part] - alone).abs().max() / scale).item())
        start += length
    tolerance = 64 * torch.finfo(next(backbone.parameters()).dtype).eps
    if not worst <= tolerance:
        raise UserError(
            f"data.packing: documents that share a row see each other in {name} (hidden states differ by {worst:.2g} "
            "of their size); set data.packing=off"
        )
    return worst
