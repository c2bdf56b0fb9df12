"""Whose turn it is at a teacher that serves several students, and whose requests go along in the same forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disaggkd_cli.transport.teacher_link import TeacherLink


def next_in_turn(links: Sequence[TeacherLink], turn: int) -> int | None:
    """Return the first link from `turn` on, cyclically, that has a request and a free send buffer; None if none has.

    A student that does not take its replies uses up its own send buffers and is passed over; the others go on.
    """
    for offset in range(len(links)):
        index = (turn + offset) % len(links)
        if links[index].pending and links[index].free_buffers:
            return index
    return None


def next_group(links: Sequence[TeacherLink], turn: int, merge_tokens: int) -> list[int]:
    """Return the links whose oldest requests the next forward answers, once for each request; none if none waits.

    The first is the one in turn, whatever its size. The others follow in turn, each link in its own order, while
    their sequences are as long as the first one's and all tokens together stay within `merge_tokens`. Whoever goes
    along loses no turn of his own: the next turn is that of the link after the first.
    """
    first = next_in_turn(links, turn)
    if first is None:
        return []
    leader = links[first].pending[0].request
    group, taken, tokens = [first], Counter([first]), leader.num_tokens
    index, passed_over = first, 0
    while passed_over < len(links):
        index = (index + 1) % len(links)
        link, position = links[index], taken[index]
        passed_over += 1
        if position >= min(len(link.pending), len(link.free_buffers)):
            continue
        request = link.pending[position].request
        if request.input_ids.shape[1] == leader.input_ids.shape[1] and tokens + request.num_tokens <= merge_tokens:
            group.append(index)
            taken[index] += 1
            tokens += request.num_tokens
            passed_over = 0
    return group
