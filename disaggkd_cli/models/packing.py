"""May several documents share a row? Only where attention keeps them apart: decided by layer type, then proved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.config import Config
from disaggkd_cli.config.attention import unproved_with_packing
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.config.packing import separates_documents
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.head import hidden_states
from disaggkd_cli.models.load import load_config, student_source_config, teacher_source


def packs_documents(model_config: Any) -> tuple[bool, str]:
    """Return whether a model keeps packed documents apart by its kind, and why (not)."""
    text = model_config.get_text_config()
    return separates_documents(text.model_type, getattr(text, "layer_types", None) or [])


def decide_packing(config: Config) -> tuple[bool, str]:
    """Return whether a run packs documents into rows, and why (not), from `data.packing` and both models' kinds.

    Every role decides it from the config alone, so that all agree without asking each other.

    Raises:
        UserError: when a model's configuration cannot be read.
    """
    if student_writes(config):
        return False, "the student completes one prompt a row (on_policy)"
    if config.data.packing != "auto":
        return config.data.packing == "on", f"data.packing={config.data.packing}"
    if (unproved := unproved_with_packing(config)) is not None:
        return False, unproved
    teacher = teacher_source(config)
    for model_config in (load_config(teacher, "teacher.model"), student_source_config(config)):
        packs, reason = packs_documents(model_config)
        if not packs:
            return False, reason
    return True, reason


def leak_tolerance(dtype: torch.dtype) -> float:
    """Return how much hidden states may differ by rounding alone, relative to their size.

    Documents that do see each other differ by tenths; without a leak float32 stays below 1e-5, bfloat16 near 0.01.
    """
    return max(1e-4, 12 * torch.finfo(dtype).eps)


def relative_difference(states: Tensor, reference: Tensor) -> float:
    """Return the median over rows [L, H] of |state - reference| / |reference|.

    The median, because rounding may send a token to another expert and change that one row by much.
    """
    reference = reference.double()
    differences = (states.double() - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-30)
    return differences.median().item()


@torch.no_grad()
def verify_packing(backbone: nn.Module, vocabulary: int, name: str) -> float:
    """Check that documents of a packed row do not see each other; return the largest relative difference.

    Two comparisons: each document in the row against itself alone, and the last document before and after the tokens
    of its neighbours are changed, where rounding hardly enters and a leak shows in any dtype. The backbone is expected
    in eval mode and is left as it is.

    Raises:
        UserError: when the documents see each other.
    """
    device, dtype = next(backbone.parameters()).device, next(backbone.parameters()).dtype
    lengths = (5, 3, 8)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, min(vocabulary, 1000), (1, sum(lengths)), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    packed = hidden_states(backbone, input_ids, positions)[0]
    last = slice(sum(lengths[:-1]), None)
    others = (input_ids + 1) % min(vocabulary, 1000)
    others[:, last] = input_ids[:, last]
    worst = relative_difference(hidden_states(backbone, others, positions)[0, last], packed[last])
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = hidden_states(backbone, input_ids[:, part], positions[:, part])[0]
        worst = max(worst, relative_difference(packed[part], alone))
        start += length
    if not worst <= leak_tolerance(dtype):
        raise UserError(
            f"data.packing: documents that share a row see each other in {name} (hidden states differ by {worst:.2g} "
            "of their size); set data.packing=off"
        )
    return worst
