"""How the fused loss cuts its work: window of rows, shard of the vocabulary, logits that are kept. Imports no torch.

The loss passes over windows of `window` rows. For each it computes the logits of both models shard by shard, reduces
them to statistics of the rows, and then turns the logits into gradients. Logits that were kept since the first pass
need no second matrix product; as many are kept as the memory budget allows, those of the wider model first, since they
cost most to redo.

Work is counted in floating point operations of matrix products. With everything kept it is `2 R V (3 H_s + H_t)`, as
with full logits; with nothing kept `2 R V (4 H_s + 2 H_t)`, and one more for each further pass of the mixtures and of
total variation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses.device_costs import DEVICES, CpuModel, GpuModel, TileWork
from disaggkd_cli.units import format_bytes

STATISTICS = 12
"""Numbers kept for each row and shard."""
STATISTICS_SLOTS = 16
"""Shards whose statistics wait before they are merged into one."""
EAGER_TEMPORARIES = 14
"""Buffers of a block's size that the eager pointwise part holds at once, counted generously."""
_WINDOWS = (1, 2, 4, 8) + tuple(16 * step for step in range(1, 25)) + tuple(128 * step for step in range(4, 33))
_INDIFFERENT = 1.04
_SHARDS = (32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
_ROW_VECTORS = 24


@dataclass(frozen=True)
class LossShape:
    """The size of one loss, on one rank.

    Attributes:
        rows: supervised rows.
        shared, student_extra, teacher_extra: columns both models have, and the extra vocabulary that only one has.
        student_width, teacher_width: H_s and H_t.
        element_bytes: of logits and accumulators; 4, or 8 in float64.
        student_copy_bytes, teacher_copy_bytes: bytes per element of a converted copy of head shard and hidden window;
            0 where the matrix product takes them as they are.
        operand_bytes: per element of the products' operands.
        gradient_copy_bytes: bytes per element of the low-precision copy of a gradient tile; 0 where there is none.
        hidden_copy: dH is accumulated in a buffer of the window's size instead of in place.
        gathered: windows of hidden states are copies, since not every row is supervised.
        weight_copy: dW's shard passes through a buffer before it is added.
        gradients: False for evaluation.
        weight_gradient, hidden_gradient: which gradients are wanted.
        further_passes: over the logits after the first: 0 (KL, evaluation), 1, or 2 (mixtures and total variation).
        compiled: the pointwise part is compiled and holds no temporaries.
        device: key of DEVICES.
    """

    rows: int
    shared: int
    student_width: int
    teacher_width: int
    student_extra: int = 0
    teacher_extra: int = 0
    element_bytes: int = 4
    student_copy_bytes: int = 0
    teacher_copy_bytes: int = 0
    operand_bytes: int = 4
    gradient_copy_bytes: int = 0
    hidden_copy: bool = False
    gathered: bool = False
    weight_copy: bool = False
    gradients: bool = True
    weight_gradient: bool = True
    hidden_gradient: bool = True
    further_passes: int = 1
    compiled: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class Tiling:
    """A way to cut the work.

    Attributes:
        window: rows.
        shard: columns.
        student_kept, teacher_kept: shards of a window whose logits stay for the later passes.
        block: elements of a block of the eager pointwise part.
        scratch_bytes: peak scratch beside inputs and gradients.
        gemm_flops: work in matrix products.
        seconds: the cost model's guess; only its order matters.
    """

    window: int
    shard: int
    student_kept: int
    teacher_kept: int
    block: int
    scratch_bytes: int
    gemm_flops: float
    seconds: float


def choose_tiling(shape: LossShape, memory_budget: int) -> Tiling:
    """Return the cheapest tiling whose scratch stays within `memory_budget` bytes.

    Raises:
        UserError: not even the smallest tile fits; the message names the least budget that would do.
    """
    # Rows differ from step to step; rounded up, the choice of few of them is remembered.
    step = 1 << max(shape.rows.bit_length() - 4, 0)
    return _choose_tiling(replace(shape, rows=-(-shape.rows // step) * step), memory_budget)


@functools.lru_cache(maxsize=1024)
def _choose_tiling(shape: LossShape, memory_budget: int) -> Tiling:
    device = DEVICES[shape.device]
    windows = sorted({min(max(shape.rows, 1), window) for window in _WINDOWS})
    columns = max(shape.shared, shape.student_extra, shape.teacher_extra, 1)
    shards = sorted({min(columns, shard) for shard in _SHARDS})
    fitting: list[Tiling] = []
    least = float("inf")
    for window in windows:
        for shard in shards:
            if window * shard > device.largest_tile and shard > shards[0]:
                continue
            tiling = _tiling(shape, device, window, shard, memory_budget)
            least = min(least, tiling.scratch_bytes)
            if tiling.scratch_bytes <= memory_budget:
                fitting.append(tiling)
    if not fitting:
        raise UserError(
            f"memory_budget={format_bytes(memory_budget)} is too small for this loss: its smallest tile needs "
            f"{format_bytes(least)}; raise loss.memory_budget to at least that"
        )
    cheapest = min(tiling.seconds for tiling in fitting)
    # The model does not tell such small differences apart. Of these the largest: so the scratch depends on the budget
    # alone, not on how rows and vocabulary happen to divide.
    good = [tiling for tiling in fitting if tiling.seconds <= cheapest * _INDIFFERENT]
    return max(good, key=lambda tiling: tiling.scratch_bytes)


def _tiling(shape: LossShape, device: CpuModel | GpuModel, window: int, shard: int, memory_budget: int) -> Tiling:
    element = shape.element_bytes
    shards = -(-shape.shared // shard)
    block = 0
    if not shape.compiled or shape.student_extra or shape.teacher_extra:
        affordable = max(1, memory_budget // (16 * EAGER_TEMPORARIES * element))
        # A block is at least one row of a shard.
        block = max(shard, min(device.largest_block, affordable, window * shard))
    fixed = EAGER_TEMPORARIES * element * block
    fixed += shard * max(shape.student_width * shape.student_copy_bytes, shape.teacher_width * shape.teacher_copy_bytes)
    fixed += window * (shape.student_width * shape.student_copy_bytes + shape.teacher_width * shape.teacher_copy_bytes)
    fixed += window * (shape.student_width + shape.teacher_width) * element if shape.gathered else 0
    fixed += window * shard * shape.gradient_copy_bytes
    fixed += window * shape.student_width * element if shape.hidden_copy and shape.hidden_gradient else 0
    fixed += shard * shape.student_width * element if shape.weight_copy and shape.weight_gradient else 0
    # Statistics wait in slots, and merging them holds about as much again.
    fixed += window * element * (2 * STATISTICS * (min(shards + 1, STATISTICS_SLOTS) + 1) + _ROW_VECTORS)
    tile = window * shard * element

    kept = {"student": 0, "teacher": 0}
    spare = memory_budget - fixed - 2 * tile
    if shape.further_passes and spare >= 0:
        sides = sorted(("student", "teacher"), key=lambda side: _width(shape, side), reverse=True)
        for side in sides:
            # A side that is kept whole needs no tile to recompute into, unless it has ids of its own.
            whole = shards - 1 + bool(_extra(shape, side))
            if spare >= whole * tile:
                kept[side] = shards
                spare -= whole * tile
            else:
                kept[side] = int(max(0, spare // tile))
                spare -= kept[side] * tile
    slots = sum(shards if count == shards and not _extra(shape, side) else count + 1 for side, count in kept.items())
    scratch = fixed + max(slots, 2) * tile

    share = {side: 1 - count / max(shards, 1) for side, count in kept.items()}
    passes = shape.student_width + shape.teacher_width
    passes += shape.further_passes * (share["student"] * shape.student_width + share["teacher"] * shape.teacher_width)
    if shape.gradients:
        passes += shape.student_width * (int(shape.hidden_gradient) + int(shape.weight_gradient))
    flops = 2.0 * shape.rows * shape.shared * passes
    extra = shape.student_extra * shape.student_width + shape.teacher_extra * shape.teacher_width
    flops += 2.0 * shape.rows * (extra + (3 * shape.student_extra * shape.student_width if shape.gradients else 0))
    work = TileWork(
        window=window,
        shard=shard,
        student_width=shape.student_width,
        teacher_width=shape.teacher_width,
        student_products=1 + shape.further_passes * share["student"],
        teacher_products=1 + shape.further_passes * share["teacher"],
        hidden_gradient=shape.gradients and shape.hidden_gradient,
        weight_gradient=shape.gradients and shape.weight_gradient,
        passes=1 + shape.further_passes,
        operand_bytes=shape.operand_bytes,
        result_bytes=element,
        weight_copy=shape.weight_copy,
    )
    # Tiles at the edges work by their elements, but are called like any other; extra vocabulary works like shared ones.
    seconds = device.seconds(work) * flops / (2.0 * window * shard * passes)
    tiles = -(-shape.rows // window) * max(shards, 1)
    seconds += tiles * device.call_seconds * (1 + shape.further_passes)
    return Tiling(window, shard, kept["student"], kept["teacher"], block, scratch, flops, seconds)


def _width(shape: LossShape, side: str) -> int:
    return shape.student_width if side == "student" else shape.teacher_width


def _extra(shape: LossShape, side: str) -> int:
    return shape.student_extra if side == "student" else shape.teacher_extra
