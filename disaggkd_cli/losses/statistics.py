"""What the fused loss knows of each row: partial statistics of tiles or ranks, and the one rule that merges them.

A tile of columns knows its own log-sum-exps and the KLs of its own conditional distributions. With `pi_i` and `rho_i`
the masses of tile i under the two models, `KL = sum_i pi_i (kl_i + log pi_i - log rho_i)`: associative, so that tiles
and the ranks of a vocabulary-parallel group merge alike, and no large numbers are subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.losses.collectives import all_gather
from disaggkd_cli.losses.tiling import STATISTICS, STATISTICS_SLOTS


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of rows over some columns; each is [..., w].

    Attributes:
        student_lse, teacher_lse: log-sum-exp of the tempered logits over shared ids.
        student_lse_plain: log-sum-exp of the student's logits at temperature 1 over all of its ids.
        forward_kl, reverse_kl: KL(p || q) and KL(q || p) of the distributions conditional on these columns.
        student_max, teacher_max: largest tempered logit over shared ids.
        student_first, teacher_first: the shared id where that is first reached, as a number of the logits' dtype (exact
            below 2**24 ids); infinity where there are no columns.
        label_logit: the student's logit of the label, 0.0 where the label is not among these columns.
        student_extra_lse, teacher_extra_lse: log-sum-exp of the tempered logits over ids that only one model has.
    """

    student_lse: Tensor
    teacher_lse: Tensor
    student_lse_plain: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor
    student_max: Tensor
    teacher_max: Tensor
    student_first: Tensor
    teacher_first: Tensor
    label_logit: Tensor
    student_extra_lse: Tensor
    teacher_extra_lse: Tensor

    def agreement(self) -> Tensor:
        """Whether the first of the likeliest shared ids is the same one for both models [w]."""
        return (self.student_first == self.teacher_first) & (self.student_first < float("inf"))

    def dropped_teacher_mass(self) -> Tensor:
        """The teacher's probability on ids that the student lacks [w]."""
        return torch.sigmoid(self.teacher_extra_lse - self.teacher_lse)

    def dropped_student_mass(self) -> Tensor:
        """The student's probability on ids that the teacher lacks [w]."""
        return torch.sigmoid(self.student_extra_lse - self.student_lse)


FIELDS = tuple(RowStatistics.__dataclass_fields__)
_OF_NO_COLUMNS = {
    "forward_kl": 0.0,
    "reverse_kl": 0.0,
    "student_first": float("inf"),
    "teacher_first": float("inf"),
    "label_logit": 0.0,
}
"""Statistics over no columns at all, where they are not minus infinity."""


class StatisticsOfWindow:
    """Collects the partial statistics of one window, merging a few shards at a time."""

    def __init__(self, capacity: int, window: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make room for windows of up to `window` rows that come in `capacity` parts."""
        self._slots = torch.empty(min(capacity + 1, STATISTICS_SLOTS), STATISTICS, window, device=device, dtype=dtype)
        self._of_none = torch.full((STATISTICS, 1), float("-inf"), device=device, dtype=dtype)
        for name, value in _OF_NO_COLUMNS.items():
            self._of_none[FIELDS.index(name)].fill_(value)
        self._rows = self._used = 0

    def start(self, rows: int) -> None:
        """Forget everything; the next window has `rows` rows."""
        self._rows, self._used = rows, 0
        self.add()

    def add(self, **partial: Tensor) -> None:
        """Add the statistics of further columns by the names of RowStatistics; those not named are of no columns."""
        if self._used == len(self._slots):
            self._slots[0, :, : self._rows] = _stacked(merge(self._parts()))
            self._used = 1
        slot = self._slots[self._used, :, : self._rows]
        self._used += 1
        slot.copy_(self._of_none)
        for name, value in partial.items():
            slot[FIELDS.index(name)] = value

    def merged(self, group: dist.ProcessGroup | None) -> RowStatistics:
        """Return the statistics over all columns added so far, and over those of the other ranks of `group`."""
        merged = merge(self._parts())
        if group is None:
            return merged
        own = _stacked(merged)
        everyone = own.new_empty(dist.get_world_size(group) * len(own), own.shape[1])
        all_gather(everyone, own, group)
        return merge(RowStatistics(*everyone.view(-1, *own.shape).unbind(1)))

    def _parts(self) -> RowStatistics:
        return RowStatistics(*self._slots[: self._used, :, : self._rows].unbind(1))


def merge(parts: RowStatistics) -> RowStatistics:
    """Return the statistics [w] of all columns from those of disjoint sets of columns [n, w]."""
    student_lse, teacher_lse = parts.student_lse.logsumexp(0), parts.teacher_lse.logsumexp(0)
    log_pi, log_rho = parts.student_lse - student_lse, parts.teacher_lse - teacher_lse
    student_max, teacher_max = parts.student_max.amax(0), parts.teacher_max.amax(0)
    infinity = float("inf")
    return RowStatistics(
        student_lse=student_lse,
        teacher_lse=teacher_lse,
        student_lse_plain=parts.student_lse_plain.logsumexp(0),
        forward_kl=_merged_kl(parts.forward_kl, log_rho, log_pi),
        reverse_kl=_merged_kl(parts.reverse_kl, log_pi, log_rho),
        student_max=student_max,
        teacher_max=teacher_max,
        student_first=torch.where(parts.student_max == student_max, parts.student_first, infinity).amin(0),
        teacher_first=torch.where(parts.teacher_max == teacher_max, parts.teacher_first, infinity).amin(0),
        label_logit=parts.label_logit.sum(0),
        student_extra_lse=parts.student_extra_lse.logsumexp(0),
        teacher_extra_lse=parts.teacher_extra_lse.logsumexp(0),
    )


def _merged_kl(kl: Tensor, log_mass: Tensor, log_other_mass: Tensor) -> Tensor:
    mass = log_mass.exp()
    return torch.where(mass > 0, mass * (kl + log_mass - log_other_mass), 0.0).sum(0)


def _stacked(statistics: RowStatistics) -> Tensor:
    return torch.stack([getattr(statistics, name) for name in FIELDS])
