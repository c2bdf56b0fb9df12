"""Make a model use the attention kernels that the config asks for. What each means: `config/attention.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from disaggkd_cli.config.attention import FLASH, FLASH_3, FLEX, GPU_ONLY, VARLEN
from disaggkd_cli.data import to_device
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.documents import known_documents


def set_attention(model: nn.Module, attention: str, key: str) -> None:
    """Make `model` use the named kernels; `auto` leaves transformers' choice.

    Args:
        model: a transformers causal LM.
        attention: a name of `config.attention.ATTENTION`.
        key: the config key that named it, for messages.

    Raises:
        UserError: the model's class does not know them, or their package or a GPU for them is not here.
    """
    if attention == "auto":
        return
    require_attention(attention, key)
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0) if attention == FLEX else 0.0
    if dropout:
        raise UserError(
            f"{key}: flex_attention has no dropout, and the model's attention_dropout is {dropout}; use sdpa"
        )
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{key}: {type(model).__name__} cannot use {attention}: {why}") from None


def set_attention_of_checks(model: nn.Module, attention: str, key: str, device: torch.device) -> None:
    """As `set_attention`, except that a model on a CPU is proved with transformers' choice where the kernels asked for
    run on GPUs only."""
    if attention not in GPU_ONLY or device.type == "cuda":
        set_attention(model, attention, key)


def require_attention(attention: str, key: str) -> None:
    """Raise UserError when the package that the named kernels need is not installed, or there is no GPU for it."""
    if attention == FLASH and not is_flash_attn_2_available():
        raise UserError(
            f"{key}: flash_attention_2 needs the flash-attn package and a GPU, and one of them is not here; "
            "`pip install flash-attn --no-build-isolation`, or use sdpa"
        )
    if attention == FLASH_3 and not is_flash_attn_3_available():
        raise UserError(
            f"{key}: flash_attention_3 needs the flash_attn_3 package (flash-attention's directory `hopper`) "
            "and a GPU, and one of them is not here; use flash_attention_2 or sdpa"
        )
    if attention == FLEX and not torch.cuda.is_available():
        raise UserError(f"{key}: flex_attention needs a GPU, and none is here; use auto, eager or sdpa")


def document_boundaries(backbone: nn.Module, position_ids: Tensor) -> dict[str, Any]:
    """Return the arguments that keep documents of a row apart in flash-attn's kernels; none for other kernels.

    transformers tells documents by positions that start again; for flash-attn it does so in batches of one row only.
    With several rows its kernels must be given where documents begin in the rows laid end to end. Where the host does
    not know (`documents_known`), that is read back from the GPU.

    Args:
        backbone: of a transformers causal LM.
        position_ids: [B, S] int64, starting again from zero with each document.
    """
    config = getattr(backbone, "config", None)
    if config is None or getattr(config.get_text_config(), "_attn_implementation", None) not in VARLEN:
        return {}
    documents = known_documents()
    if documents is None:
        starts = (position_ids.reshape(-1) == 0).nonzero().reshape(-1)
        if len(starts) == len(position_ids):
            return {}
        bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
        longest = int(bounds.diff().max())
    else:
        lengths = [length for row in documents for length in row]
        if len(lengths) == len(documents):
            return {}
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        bounds[1:] = torch.tensor(lengths).cumsum(0)
        bounds, longest = to_device(bounds, position_ids.device), max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
