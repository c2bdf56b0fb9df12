"""Which attention kernels a model uses: transformers' choice, or the one that the config asks for."""

from __future__ import annotations

from torch import nn
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
