"""The attention kernels that a config may name, and what each means: read by runs, by checks and by the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

AUTO, EAGER, SDPA = "auto", "eager", "sdpa"
FLASH, FLASH_3, FLEX = "flash_attention_2", "flash_attention_3", "flex_attention"
ATTENTION = (AUTO, EAGER, SDPA, FLASH, FLASH_3, FLEX)

VARLEN = (FLASH, FLASH_3)
"""Take the boundaries of documents (`cu_seq_lens`) instead of a mask, and compute in 16 bits only."""
GPU_ONLY = (*VARLEN, FLEX)
"""flash-attn's have no other kernels; flex_attention has no backward on CPUs."""


def kernel_that_runs(wanted: str, *, softcap: bool = False, sinks: bool = False) -> str:
    """Return what runs where `wanted` is asked for: eager, sdpa, or one of `GPU_ONLY`.

    `auto` is transformers' choice: sdpa, except for soft caps of the scores. Sinks have eager code, and flex's.

    Args:
        wanted: `teacher.attention` or `student.attention`.
        softcap, sinks: whether the model's attention has them.
    """
    if wanted == FLEX or (wanted in VARLEN and not sinks):
        return wanted
    if wanted == EAGER or sinks or (wanted == AUTO and softcap):
        return EAGER
    return SDPA


def builds_dense_mask(kernel: str, *, packed: bool, windowed: bool) -> bool:
    """Whether a forward has a mask of [S, S]; keys and values are then repeated for each query head.

    Args:
        kernel: as `kernel_that_runs` returns it.
        packed: documents share rows.
        windowed: the layer sees a window that is not longer than the rows.
    """
    return kernel not in GPU_ONLY and (packed or windowed or kernel == EAGER)


def unproved_with_packing(config: Any) -> str | None:
    """Return why `data.packing: auto` packs nothing with the kernels asked for; None where it may."""
    for name in (config.teacher.attention, config.student.attention):
        if name in GPU_ONLY:
            return f"{name} packs only with data.packing=on: not proved on a GPU yet"
    return None


def problems(config: Any) -> Iterator[str]:
    """Yield what the config alone says cannot be."""
    for side_name, side in (("student", config.student), ("teacher", config.teacher)):
        if side.attention not in GPU_ONLY:
            continue
        key = f"{side_name}.attention: {side.attention}"
        if side.attention in VARLEN and side.dtype == "float32":
            yield f"{key} computes in 16 bits; set {side_name}.dtype=bfloat16"
        if config.launch.device == "cpu":
            yield f"{key} needs a GPU, but launch.device=cpu; use auto, eager or sdpa"
