"""How the student's ranks are laid out: replicas of it, shards within a replica, and who keeps which token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.losses import shard_bounds

SHARD, REPLICATE = "shard", "replicate"
"""Names of the mesh's dimensions. Ranks of one replica are neighbours, so that shards stay within a node."""

_BROKEN_COLLECTIVE = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
)


@dataclass(frozen=True)
class StudentLayout:
    """Where one student rank stands. Rank r is shard `r % shard_ranks` of replica `r // shard_ranks`.

    Attributes:
        ranks: all student ranks.
        replicate: replicas of the sharded student (HSDP); 1 is plain FSDP.
        rank: this one.
        vocabulary_parallel: the ranks of a replica keep one shard of both heads each.
    """

    ranks: int = 1
    replicate: int = 1
    rank: int = 0
    vocabulary_parallel: bool = False

    @property
    def shard_ranks(self) -> int:
        """Ranks that one replica of the student is sharded over."""
        return self.ranks // self.replicate

    @property
    def shard_rank(self) -> int:
        """Which shard of its replica this rank keeps."""
        return self.rank % self.shard_ranks

    def student_ids(self, vocabulary: int) -> tuple[int, int]:
        """Return `(start, stop)`, the ids of the student's head that this rank keeps; all without such sharding."""
        if not self.vocabulary_parallel:
            return 0, vocabulary
        return shard_bounds(vocabulary, self.shard_ranks, self.shard_rank)

    def teacher_ids(self, student_vocabulary: int, teacher_vocabulary: int) -> tuple[int, int]:
        """Return `(start, stop)` of the teacher's head: cut at the student's ids; the last rank keeps the extra
        vocabulary.

        The student decides, because its shards must be those that checkpoints and FSDP know; a teacher's extra ids
        are padding and few.
        """
        start, stop = self.student_ids(student_vocabulary)
        if not self.vocabulary_parallel or self.shard_rank == self.shard_ranks - 1:
            stop = teacher_vocabulary
        return min(start, teacher_vocabulary), min(stop, teacher_vocabulary)

    def describe(self) -> str:
        """The layout in words."""
        words = f"sharded over {self.shard_ranks} ranks" if self.shard_ranks > 1 else "whole on each rank"
        if self.replicate > 1:
            words += f", {self.replicate} replicas"
        if self.vocabulary_parallel:
            words += f"; each rank keeps 1/{self.shard_ranks} of both heads"
        return words


def layout_of(config: Config, rank: int, *, vocabulary_parallel: bool = False) -> StudentLayout:
    """Return a rank's place in the layout that the config asks for; a vocabulary is never cut for one rank."""
    student = config.student
    cut = vocabulary_parallel and student.ranks // student.replicate > 1
    return StudentLayout(student.ranks, student.replicate, rank, cut)


def group_timeout(config: Config) -> timedelta:
    """Return how long a collective of the student's ranks may wait.

    A rank may wait for another one that waits for a teacher, so this lies above `transport.teacher_wait`.
    """
    return timedelta(seconds=config.transport.teacher_wait + config.transport.timeout + 300)


def student_mesh(
    device_type: str, world: dist.ProcessGroup, replicate: int = 1, timeout: timedelta | None = None
) -> DeviceMesh:
    """Return the mesh over all student ranks: `[shard]`, or `[replicate, shard]` for HSDP. Collective over them.

    Args:
        device_type: `cpu` or `cuda`.
        world: the group of all student ranks.
        replicate: replicas of the sharded student.
        timeout: of the groups that are made here; groups do not inherit it from `world`.
    """
    ranks = torch.arange(dist.get_world_size())
    if replicate == 1:
        return DeviceMesh.from_group(world, device_type, mesh=ranks, mesh_dim_names=(SHARD,))
    grid, rank = ranks.view(replicate, -1), dist.get_rank()
    # Every rank makes every group, in one order: a group's name counts those made before it.
    shards = [dist.new_group(row.tolist(), timeout=timeout) for row in grid]
    replicas = [dist.new_group(column.tolist(), timeout=timeout) for column in grid.T]
    width = grid.shape[1]
    own = [replicas[rank % width], shards[rank // width]]
    return DeviceMesh.from_group(own, device_type, mesh=grid, mesh_dim_names=(REPLICATE, SHARD))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a student mesh that this rank's own replica is sharded over."""
    return mesh if mesh.ndim == 1 else mesh[SHARD]


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Turn the failure of a collective into a RunError that says what it waited for.

    Raises:
        RunError: a peer is gone, or did not come within the group's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if isinstance(error, dist.DistError) or any(word in message.lower() for word in _BROKEN_COLLECTIVE):
            # gloo begins with its own source line and goes on with advice.
            line = re.sub(r"^\[\S+\] ", "", message.strip()).split(". ")[0].split("\n")[0] or type(error).__name__
            raise RunError(f"another student rank is gone or stuck; this one waited for {what} ({line})") from error
        raise
