"""Which attention runs, and what its scores and masks take: kernels that fuse the softmax keep none, others [S, S]."""

from __future__ import annotations

from collections.abc import Iterable

from disaggkd_cli.config.attention import EAGER, FLEX, builds_dense_mask, kernel_that_runs
from disaggkd_cli.planner.models.shapes import GatedDeltaNet, GroupedQueryAttention, LatentAttention, LayerShape

Mixer = GroupedQueryAttention | LatentAttention | GatedDeltaNet


def kernel(mixer: Mixer, wanted: str) -> str:
    """Return what runs for `student.attention` or `teacher.attention`; see `config.attention.kernel_that_runs`."""
    return kernel_that_runs(
        wanted, softcap=bool(getattr(mixer, "softcap", None)), sinks=bool(getattr(mixer, "sinks", False))
    )


def masked(mixer: Mixer, sequence: int, packed: bool, wanted: str) -> bool:
    """Whether attention gets a [S, S] mask; keys and values are then repeated for each query head."""
    if isinstance(mixer, GatedDeltaNet):
        return False
    window = getattr(mixer, "window", None)
    windowed = window is not None and sequence >= window
    return builds_dense_mask(kernel(mixer, wanted), packed=packed, windowed=windowed)


def repeated(mixer: Mixer, sequence: int, packed: bool, wanted: str) -> bool:
    """Whether keys and values are kept once for each query head.

    With a mask they are. transformers' flex_attention shares them only among heads of a power of two.
    """
    heads = getattr(mixer, "heads", 1)
    return masked(mixer, sequence, packed, wanted) or (kernel(mixer, wanted) == FLEX and heads & (heads - 1) != 0)


def forward_score_bytes(mixer: Mixer, wanted: str, b: int) -> int:
    """Bytes for a head, token and key at the fullest moment of eager attention without gradients; 0 for kernels.

    Sinks: scores, their copy with the sink's column, and the softmax of it. Others: scores in the compute dtype, and
    the softmax's float32 input and output.
    """
    if isinstance(mixer, GatedDeltaNet) or kernel(mixer, wanted) != EAGER:
        return 0
    return 3 * b if getattr(mixer, "sinks", False) else 8 + b % 4


def mask_bytes(layers: Iterable[LayerShape], sequence: int, packed: bool, wanted: str, b: int) -> int:
    """Bytes for a token and key that the masks of a model take: one for each kind of attention (full, each window).

    Eager attention adds masks of the compute dtype. Kernels take boolean ones and turn the layer's into 16 bits.
    """
    kinds = {
        (getattr(layer.mixer, "window", None), kernel(layer.mixer, wanted))
        for layer in layers
        if masked(layer.mixer, sequence, packed, wanted)
    }
    eager = any(kernel == EAGER for _, kernel in kinds)
    return len(kinds) * b if eager else len(kinds) + (2 if kinds else 0)
