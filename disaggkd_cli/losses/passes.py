"""The passes of the fused loss over windows of rows and shards of the vocabulary.

For each window: (1) logits shard by shard, as many kept as the tiling says, and the statistics of the rows; (2)
statistics merged, over the ranks too; (3) mixtures and total variation only: value and row baseline in a pass of their
own; (4) gradient tiles, in place, added to dH of the window and dW of the shard at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.losses.groups import VocabularyShard
from disaggkd_cli.losses.matmul import Precision, add_product, converted, product_into
from disaggkd_cli.losses.pointwise import SHARED_STATISTICS, PointwiseSpec, TileKernels
from disaggkd_cli.losses.statistics import RowStatistics, StatisticsOfWindow
from disaggkd_cli.losses.tiling import Tiling


@dataclass(frozen=True)
class Side:
    """Hidden states [R, H], head weight [V, H] and bias [V] of one model, without gradients, and its products' dtypes.

    `changes_product` says that logits are more than matrix products: there is a bias, a scale or a soft cap.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    precision: Precision
    changes_product: bool

    def window(self, rows: slice | Tensor) -> Tensor:
        """Hidden states of `rows` as operands of the logits' product."""
        return converted(self.hidden[rows], self.precision.rounding, self.precision.operand)

    def logits_product(self, out: Tensor, window: Tensor, columns: slice) -> None:
        """`out = window @ weight[columns].T`."""
        weight = converted(self.weight[columns], self.precision.rounding, self.precision.operand)
        product_into(out, window, weight.t())

    def bias_row(self, columns: slice) -> Tensor | None:
        """The bias of `columns` as [1, v]."""
        if self.bias is None:
            return None
        return converted(self.bias[columns], self.precision.rounding, self.precision.result).unsqueeze(0)


@dataclass(frozen=True)
class Problem:
    """All that the passes need; see `fused_kd_loss`.

    Attributes:
        labels: [R'] token ids; None without labels.
        rows: [R'] indices of the supervised rows; None when all do.
        count: R'.
        gradients: False for evaluation; then nothing but the sums is computed.
        hidden_factor: scalar that dH is multiplied by before it is rounded to the dtype of the hidden states, or None.
    """

    student: Side
    teacher: Side
    labels: Tensor | None
    rows: Tensor | None
    count: int
    spec: PointwiseSpec
    kernels: TileKernels
    shard: VocabularyShard
    tiling: Tiling
    gradients: bool
    hidden_gradient: bool
    weight_gradient: bool
    bias_gradient: bool
    hidden_factor: Tensor | None


@dataclass(frozen=True)
class Result:
    """Sums over rows, and the gradients of `kd_weight * temperature**2 * KD + ce_weight * CE` summed over rows.

    Attributes:
        sums: [5]: kd, ce, top-1 agreement, dropped teacher mass, dropped student mass.
        hidden: [R, H_s] in the dtype of the hidden states, or None.
        weight: [V, H_s] in the accumulators' dtype, or None.
        bias: [V] likewise, or None.
    """

    sums: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run_passes(problem: Problem) -> Result:
    """Pass over all windows and return sums and gradients."""
    student, tiling, dtype = problem.student, problem.tiling, problem.student.precision.result
    device = student.hidden.device
    sums = torch.zeros(5, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    hidden_gradient = weight_gradient = bias_gradient = None
    if problem.hidden_gradient:
        # Rows that are not supervised get zeros.
        allocate = torch.empty_like if problem.rows is None else torch.zeros_like
        hidden_gradient = allocate(student.hidden, memory_format=torch.contiguous_format)
    if problem.weight_gradient:
        allocate = torch.empty if problem.count else torch.zeros
        weight_gradient = allocate(student.weight.shape, device=device, dtype=dtype)
    if problem.bias_gradient:
        bias_gradient = torch.zeros(student.weight.shape[0], device=device, dtype=dtype)
    result = Result(sums, hidden_gradient, weight_gradient, bias_gradient)
    if problem.count:
        scratch = _Scratch(problem)
        for start in range(0, problem.count, tiling.window):
            _Window(problem, result, scratch, start, min(start + tiling.window, problem.count)).run()
    return result


def _shards(start: int, stop: int, width: int) -> Iterator[slice]:
    for first in range(start, stop, width):
        yield slice(first, min(first + width, stop))


class _Scratch:
    """The buffers of one loss, made once: kept logits, a tile for logits that are not kept, statistics, dH of a
    window."""

    def __init__(self, problem: Problem) -> None:
        tiling, shard = problem.tiling, problem.shard
        device, dtype = problem.student.hidden.device, problem.student.precision.result
        self.shared = list(_shards(0, shard.shared, tiling.shard))
        self.student_extra = list(_shards(shard.shared, shard.student_columns, tiling.shard))
        self.teacher_extra = list(_shards(shard.shared, shard.teacher_columns, tiling.shard))
        tile = tiling.window * tiling.shard

        def buffers(kept: int, extra: list[slice]) -> list[Tensor]:
            count = kept if kept >= len(self.shared) and not extra else kept + 1
            return [torch.empty(tile, device=device, dtype=dtype) for _ in range(max(count, 1))]

        self.student_logits = buffers(min(tiling.student_kept, len(self.shared)), self.student_extra)
        self.teacher_logits = buffers(min(tiling.teacher_kept, len(self.shared)), self.teacher_extra)
        parts = len(self.shared) + len(self.student_extra) + len(self.teacher_extra)
        self.statistics = StatisticsOfWindow(parts, tiling.window, device, dtype)
        gradient = problem.student.precision.gradient
        self.gradient_tile = torch.empty(tile, device=device, dtype=gradient) if gradient != dtype else None
        self.hidden = None
        if problem.hidden_gradient and (
            problem.rows is not None or problem.student.hidden.dtype != dtype or shard.group
        ):
            width = problem.student.hidden.shape[1]
            self.hidden = torch.empty(tiling.window, width, device=device, dtype=dtype)
        self._columns = torch.arange(tiling.shard, device=device, dtype=torch.int32).unsqueeze(0)
        self._ids = torch.empty_like(self._columns)
        self._first_id = shard.student_start

    def ids(self, columns: slice) -> Tensor:
        """The token ids [1, v] of `columns`, valid until the next call."""
        width = columns.stop - columns.start
        return torch.add(self._columns[:, :width], self._first_id + columns.start, out=self._ids[:, :width])


class _Window:
    """One window of rows, `start` to `stop - 1` of the supervised ones."""

    def __init__(self, problem: Problem, result: Result, scratch: _Scratch, start: int, stop: int) -> None:
        self.problem, self.result, self.scratch = problem, result, scratch
        self.start, self.count = start, stop - start
        self.rows = slice(start, stop) if problem.rows is None else problem.rows[start:stop]
        self.labels = None if problem.labels is None else problem.labels[start:stop].to(torch.int32).unsqueeze(1)
        self.student_window = problem.student.window(self.rows)
        self.teacher_window = problem.teacher.window(self.rows)

    def run(self) -> None:
        """Add this window's sums and gradients to the result."""
        problem, spec = self.problem, self.problem.spec
        self.scratch.statistics.start(self.count)
        for index, columns in enumerate(self.scratch.shared):
            self._shared_statistics(index, columns)
        for columns in self.scratch.student_extra:
            tile = self._tile(self.scratch.student_logits, -1, columns)
            self._extra_statistics(problem.student, self.student_window, tile, columns, True)
        for columns in self.scratch.teacher_extra:
            tile = self._tile(self.scratch.teacher_logits, -1, columns)
            self._extra_statistics(problem.teacher, self.teacher_window, tile, columns, False)
        statistics = self.scratch.statistics.merged(problem.shard.group)
        if spec.divergence.from_kl is None:
            value, row_baseline = self._row_terms(statistics)
        else:
            value = spec.divergence.from_kl(statistics.forward_kl, statistics.reverse_kl, spec.beta)
            row_baseline = statistics.reverse_kl
        self._add_sums(value.clamp(min=0), statistics)
        if problem.gradients:
            self._gradients(statistics, row_baseline)

    def _tile(self, buffers: list[Tensor], index: int, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        return buffers[index][: self.count * width].view(self.count, width)

    def _student_tile(self, index: int, columns: slice) -> Tensor:
        kept = index < self.problem.tiling.student_kept
        return self._tile(self.scratch.student_logits, index if kept else -1, columns)

    def _teacher_tile(self, index: int, columns: slice) -> Tensor:
        kept = index < self.problem.tiling.teacher_kept
        return self._tile(self.scratch.teacher_logits, index if kept else -1, columns)

    def _shared_statistics(self, index: int, columns: slice) -> None:
        problem = self.problem
        student, teacher = self._student_tile(index, columns), self._teacher_tile(index, columns)
        problem.student.logits_product(student, self.student_window, columns)
        problem.teacher.logits_product(teacher, self.teacher_window, columns)
        values = problem.kernels.statistics(
            student, teacher, problem.student.bias_row(columns), problem.teacher.bias_row(columns),
            self.scratch.ids(columns), self.labels,
        )  # fmt: skip
        self.scratch.statistics.add(**dict(zip(SHARED_STATISTICS, values, strict=True)))

    def _extra_statistics(self, side: Side, window: Tensor, tile: Tensor, columns: slice, of_student: bool) -> None:
        side.logits_product(tile, window, columns)
        tempered, plain, label_logit = self.problem.kernels.extra_statistics(
            tile, side.bias_row(columns), self.scratch.ids(columns), self.labels, of_student
        )
        if of_student:
            partial = {"student_extra_lse": tempered, "student_lse_plain": plain, "label_logit": label_logit}
        else:
            partial = {"teacher_extra_lse": tempered}
        self.scratch.statistics.add(**partial)

    def _logits_again(self, index: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Kept logits of both models, or those computed anew."""
        problem = self.problem
        student, teacher = self._student_tile(index, columns), self._teacher_tile(index, columns)
        if index >= problem.tiling.student_kept:
            problem.student.logits_product(student, self.student_window, columns)
            self._to_logits(student, problem.student, columns)
        if index >= problem.tiling.teacher_kept:
            problem.teacher.logits_product(teacher, self.teacher_window, columns)
            self._to_logits(teacher, problem.teacher, columns)
        return student, teacher

    def _to_logits(self, product: Tensor, side: Side, columns: slice) -> None:
        if side.changes_product:
            kernels = self.problem.kernels
            head = kernels.student_head if side is self.problem.student else kernels.teacher_head
            head(product, side.bias_row(columns))

    def _row_terms(self, statistics: RowStatistics) -> tuple[Tensor, Tensor]:
        totals = statistics.student_lse.new_zeros(2, self.count)
        student_lse, teacher_lse = statistics.student_lse.unsqueeze(1), statistics.teacher_lse.unsqueeze(1)
        for index, columns in enumerate(self.scratch.shared):
            student, teacher = self._logits_again(index, columns)
            value, baseline = self.problem.kernels.row_terms(student, teacher, student_lse, teacher_lse)
            totals[0] += value
            totals[1] += baseline
        if self.problem.shard.group is not None:
            dist.all_reduce(totals, group=self.problem.shard.group)
        return totals[0], totals[1]

    def _add_sums(self, value: Tensor, statistics: RowStatistics) -> None:
        sums = self.result.sums
        sums[0] += value.sum(dtype=sums.dtype)
        if self.labels is not None:
            sums[1] += (statistics.student_lse_plain - statistics.label_logit).sum(dtype=sums.dtype)
        sums[2] += statistics.agreement().sum(dtype=sums.dtype)
        sums[3] += statistics.dropped_teacher_mass().sum(dtype=sums.dtype)
        sums[4] += statistics.dropped_student_mass().sum(dtype=sums.dtype)

    def _gradients(self, statistics: RowStatistics, row_baseline: Tensor) -> None:
        problem, scratch = self.problem, self.scratch
        with_ce = problem.spec.ce_weight != 0
        student_lse, teacher_lse, plain_lse, row_baseline = (
            vector.unsqueeze(1)
            for vector in (statistics.student_lse, statistics.teacher_lse, statistics.student_lse_plain, row_baseline)
        )
        hidden = self._hidden_accumulator()
        operand = self.student_window.to(problem.student.precision.gradient)
        first = True
        for index, columns in enumerate(scratch.shared):
            student, teacher = self._logits_again(index, columns)
            out = student if scratch.gradient_tile is None else self._tile([scratch.gradient_tile], 0, columns)
            labels, ids = (self.labels, scratch.ids(columns)) if with_ce else (None, None)
            problem.kernels.gradient(
                student, teacher, student_lse, teacher_lse, plain_lse, row_baseline, labels, ids, out
            )
            self._add_gradients(out, columns, hidden, operand, first)
            first = False
        for columns in scratch.student_extra:
            student = self._tile(scratch.student_logits, -1, columns)
            out = student if scratch.gradient_tile is None else self._tile([scratch.gradient_tile], 0, columns)
            if with_ce:
                problem.student.logits_product(student, self.student_window, columns)
                self._to_logits(student, problem.student, columns)
                problem.kernels.extra_gradient(student, plain_lse, self.labels, scratch.ids(columns), out)
            else:
                out.zero_()
            self._add_gradients(out, columns, hidden, operand, first)
            first = False
        self._store_hidden(hidden, first)

    def _hidden_accumulator(self) -> Tensor | None:
        if self.result.hidden is None:
            return None
        return self.result.hidden[self.rows] if self.scratch.hidden is None else self.scratch.hidden[: self.count]

    def _store_hidden(self, hidden: Tensor | None, untouched: bool) -> None:
        if hidden is None:
            return
        if untouched:
            hidden.zero_()
        if self.problem.shard.group is not None:
            dist.all_reduce(hidden, group=self.problem.shard.group)
        if self.problem.hidden_factor is not None:
            hidden.mul_(self.problem.hidden_factor)
        if self.scratch.hidden is not None:
            self.result.hidden[self.rows] = hidden.to(self.result.hidden.dtype)

    def _add_gradients(
        self, gradient: Tensor, columns: slice, hidden: Tensor | None, operand: Tensor, first_of_window: bool
    ) -> None:
        precision = self.problem.student.precision
        if hidden is not None:
            weight = converted(self.problem.student.weight[columns], precision.rounding, precision.gradient)
            add_product(hidden, gradient, weight, first_of_window)
        if self.result.weight is not None:
            add_product(self.result.weight[columns], gradient.t(), operand, self.start == 0)
        if self.result.bias is not None:
            self.result.bias[columns] += gradient.sum(0, dtype=precision.result)
