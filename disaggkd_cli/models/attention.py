"""Which attention kernels a model uses: transformers' choice, or the one that the config asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from disaggkd_cli.errors import UserError

FLASH = "flash_attention_2"


def set_attention(model: nn.Module, attention: str, key: str) -> None:
    """Make `model` use the named kernels; `auto` leaves transformers' choice.

    Args:
        model: a transformers causal LM.
        attention: auto, eager, sdpa or flash_attention_2.
        key: the config key that named it, for messages.

    Raises:
        UserError: the model's class does not know them, or their package is not installed.
    """
    if attention == "auto":
        return
    require_attention(attention, key)
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{key}: {type(model).__name__} cannot use {attention}: {why}") from None


def require_attention(attention: str, key: str) -> None:
    """Raise UserError when the package that the named kernels need is not installed, or there is no GPU for it."""
    if attention == FLASH and not is_flash_attn_2_available():
        raise UserError(
            f"{key}: flash_attention_2 needs the flash-attn package and a GPU, and one of them is not here; "
            "`pip install flash-attn --no-build-isolation`, or use sdpa"
        )


def document_boundaries(backbone: nn.Module, position_ids: Tensor) -> dict[str, Any]:
    """Return the arguments that keep documents of a row apart in flash-attn's kernels; none for other kernels.

    transformers tells documents by positions that start again; for flash-attn it does so in batches of one row only.
    With several rows its kernels must be given where documents begin in the rows laid end to end. One number is read
    back from the GPU.

    Args:
        backbone: of a transformers causal LM.
        position_ids: [B, S] int64, starting again from zero with each document.
    """
    config = getattr(backbone, "config", None)
    if config is None or getattr(config.get_text_config(), "_attn_implementation", None) != FLASH:
        return {}
    starts = (position_ids.reshape(-1) == 0).nonzero().reshape(-1)
    if len(starts) == len(position_ids):
        return {}
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
