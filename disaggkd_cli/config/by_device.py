"""What `auto` comes to on a device: one owner for runs, checks and the plan. Imports no torch."""

from __future__ import annotations

from disaggkd_cli.config.schema import Config
from disaggkd_cli.layouts import AUTO
from disaggkd_cli.units import parse_bytes

CPU_BUDGET = 256 * 2**20
LEAST_GPU_BUDGET, MOST_GPU_BUDGET = 256 * 2**20, 4 * 2**30
"""At the reference shape 4 GiB make the loss some 1.4 times as fast as 256 MiB, by the tiling's model of an H100."""
_SHARE = 8
"""What the loss may take of the memory that weights and optimizer leave; activations need the rest."""
_TRAINED_BYTES, _FROZEN_BYTES = 16, 4
"""Per parameter: float32 masters, gradients and AdamW's two moments; masters alone."""


def student_dtype(config: Config, device: str) -> str:
    """Return what `student.dtype` comes to: for `auto` bfloat16 on GPUs, float32 on CPUs.

    Args:
        device: `cpu` or `cuda`.
    """
    wanted = config.student.dtype
    return wanted if wanted != AUTO else "float32" if device == "cpu" else "bfloat16"


def loss_budget(config: Config, device: str, memory_bytes: int, parameters: int, trained: int, shards: int) -> int:
    """Return the bytes of scratch that `loss.memory_budget` allows the loss on a rank.

    `auto` is 256 MiB on CPUs. On GPUs it is an eighth of the memory that the student's weights and optimizer leave,
    rounded down to a power of two from 256 MiB to 4 GiB: rounded, so that a resumed run, whose memory may differ by a
    little, cuts its work alike.

    Args:
        device: `cpu` or `cuda`.
        memory_bytes: of the GPU, free of others.
        parameters, trained: of the whole student.
        shards: ranks that it is sharded over.
    """
    if config.loss.memory_budget != AUTO:
        return parse_bytes(config.loss.memory_budget)
    return automatic_budget(device, memory_bytes, parameters, trained, shards)


def automatic_budget(device: str, memory_bytes: int, parameters: int, trained: int, shards: int) -> int:
    """Return what `loss.memory_budget: auto` comes to; see `loss_budget`."""
    if device == "cpu":
        return CPU_BUDGET
    held = (_TRAINED_BYTES * trained + _FROZEN_BYTES * (parameters - trained)) // shards
    spare = max(1, (memory_bytes - held) // _SHARE)
    return min(max(1 << (spare.bit_length() - 1), LEAST_GPU_BUDGET), MOST_GPU_BUDGET)
