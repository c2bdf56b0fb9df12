"""How many links ranks keep: follows from three numbers of the config, and is read by the transport and the planner."""

from __future__ import annotations


def groups_of_ranks(teachers: int, ranks: int, links: int) -> int:
    """Return into how many groups student ranks and teacher ranks fall, each linked within itself: 1, 2, 4, …

    As many as leave each student rank `links` teachers or more, and each teacher a student rank.
    """
    groups = 1
    while 2 * groups <= ranks and teachers >= 2 * groups * links:
        groups *= 2
    return groups


def links_of_ranks(teachers: int, ranks: int, links: int) -> tuple[int, int]:
    """Return the most links that a student rank and a teacher rank keep, where each teacher rank serves by itself."""
    groups = groups_of_ranks(teachers, ranks, links)
    return -(-teachers // groups), -(-ranks // groups)
