"""Which teachers a student rank keeps links to, once there are more than it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from disaggkd_cli.config.links import groups_of_ranks

LOOK_SECONDS = 30.0
"""Between two readings of all teachers' heartbeats; a living one has several between them."""
LOOKS_PER_SECOND = 5000
"""Readings of teachers' heartbeats, by all student ranks together: with very many of both they look less often."""


def neighbouring(teachers: Iterable[int], rank: int, ranks: int, links: int) -> set[int]:
    """Return the numbers of the teachers that student rank `rank` of `ranks` links to: `links` to twice as many.

    Teachers fall into 1, 2, 4, … groups by their number, and so do the ranks. Groups double when teachers have become
    twice as many, and each new group is half of an old one, so that links that stand remain in use as teachers come.
    Each teacher has ranks of its group, because there are never more groups than ranks.

    Args:
        teachers: numbers of all that are there.
        rank: of the student, 0 … ranks - 1.
        links: a rank that sees fewer than twice as many teachers links to all.
    """
    numbers = set(teachers)
    groups = groups_of_ranks(len(numbers), ranks, links)
    return {number for number in numbers if number % groups == rank % groups}


class Neighbourhood:
    """The teachers that one student rank links to, as teachers come and go.

    Args:
        rank, ranks, links: see `neighbouring`.
    """

    def __init__(self, rank: int, ranks: int, links: int):
        self.most = 2 * links
        self._rank, self._ranks, self._links = rank, ranks, links
        self._heartbeats: dict[int, int] = {}
        self._silent: set[int] = set()
        self._looked_at = time.monotonic()

    def of(self, announced: Iterable[int], heartbeat_count: Callable[[int], int]) -> set[int]:
        """Return the numbers of the teachers to be linked with.

        Where not all of them are, the dead do not count: they never withdraw, and would thin the groups out.

        Args:
            announced: numbers of all teachers that have not withdrawn.
            heartbeat_count: from a number to that teacher's counter of heartbeats; called now and then only.
        """
        numbers = set(announced)
        if len(numbers) < self.most or self._ranks == 1:
            return numbers
        pause = max(LOOK_SECONDS, len(numbers) * self._ranks / LOOKS_PER_SECOND)
        if time.monotonic() - self._looked_at >= pause:
            heartbeats = {number: heartbeat_count(number) for number in numbers}
            self._silent = {number for number, count in heartbeats.items() if count == self._heartbeats.get(number)}
            self._heartbeats, self._looked_at = heartbeats, time.monotonic()
        return neighbouring(numbers - self._silent, self._rank, self._ranks, self._links)
