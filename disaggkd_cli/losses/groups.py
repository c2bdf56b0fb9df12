"""What the ranks of a vocabulary-parallel group must agree on before they pass over their shards together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from disaggkd_cli.losses.arguments import LossArgumentError
from disaggkd_cli.losses.collectives import all_gather


@dataclass(frozen=True)
class VocabularyShard:
    """The part of the vocabulary that this rank holds; without a group, all of it.

    Attributes:
        group: the ranks that hold one shard each, or None.
        student_start: first id of the student's shard.
        shared: leading columns of this rank's shards that both models have.
        student_columns, teacher_columns: this rank's columns of each.
        student_vocabulary, teacher_vocabulary: columns of the whole group.
        largest: shared, the student's and the teacher's extra columns, each the largest over the group; windows follow
            from them, so that every rank passes over the same windows.
    """

    group: dist.ProcessGroup | None
    student_start: int
    shared: int
    student_columns: int
    teacher_columns: int
    student_vocabulary: int
    teacher_vocabulary: int
    largest: tuple[int, int, int]


def agree_on_shards(
    group: dist.ProcessGroup | None,
    rows: int,
    student_columns: int,
    teacher_columns: int,
    memory_budget: int,
    flags: tuple[int, ...],
    device: torch.device,
) -> tuple[VocabularyShard, int, tuple[int, ...]]:
    """Return this rank's shard, the smallest budget of the group, and each of `flags` as the largest of the group.

    Raises:
        LossArgumentError: on every rank, when rows differ or the shards of the two heads do not cover the same shared
        ids.
    """
    if group is None:
        everyone, rank = [[rows, student_columns, teacher_columns, memory_budget, *flags]], 0
    else:
        everyone, rank = _gathered(group, [rows, student_columns, teacher_columns, memory_budget, *flags], device)
    if len({row[0] for row in everyone}) > 1:
        raise LossArgumentError(
            f"the ranks of group= have different numbers of rows ({', '.join(str(row[0]) for row in everyone)}); "
            "in a vocabulary-parallel loss each rank holds all rows and a shard of the heads"
        )
    student_counts, teacher_counts = [row[1] for row in everyone], [row[2] for row in everyone]
    student_vocabulary, teacher_vocabulary = sum(student_counts), sum(teacher_counts)
    shared_vocabulary = min(student_vocabulary, teacher_vocabulary)
    shared_counts = []
    for index, (of_student, of_teacher) in enumerate(zip(student_counts, teacher_counts, strict=True)):
        student_start, teacher_start = sum(student_counts[:index]), sum(teacher_counts[:index])
        student_shared = min(max(shared_vocabulary - student_start, 0), of_student)
        teacher_shared = min(max(shared_vocabulary - teacher_start, 0), of_teacher)
        if student_shared != teacher_shared or (student_shared and student_start != teacher_start):
            raise LossArgumentError(
                f"rank {index} of group= holds student ids {student_start} to {student_start + of_student - 1} and "
                f"teacher ids {teacher_start} to {teacher_start + of_teacher - 1}; both heads must be cut at the "
                "same ids (shard_bounds of the larger vocabulary; the smaller head ends early)"
            )
        shared_counts.append(student_shared)
    shard = VocabularyShard(
        group=group,
        student_start=sum(student_counts[:rank]),
        shared=shared_counts[rank],
        student_columns=student_columns,
        teacher_columns=teacher_columns,
        student_vocabulary=student_vocabulary,
        teacher_vocabulary=teacher_vocabulary,
        largest=(
            max(shared_counts),
            max(count - shared for count, shared in zip(student_counts, shared_counts, strict=True)),
            max(count - shared for count, shared in zip(teacher_counts, shared_counts, strict=True)),
        ),
    )
    flags = tuple(max(row[4 + index] for row in everyone) for index in range(len(flags)))
    return shard, min(row[3] for row in everyone), flags


def _gathered(group: dist.ProcessGroup, numbers: list[int], device: torch.device) -> tuple[list[list[int]], int]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = own.new_empty(dist.get_world_size(group) * len(numbers))
    all_gather(everyone, own, group)
    return everyone.view(-1, len(numbers)).tolist(), dist.get_rank(group)
