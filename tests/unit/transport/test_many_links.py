"""Student ranks that link to some of many teachers, over real gloo links on loopback."""

import threading
import time

import pytest

from tests.unit.transport.test_exchange import exchange, ids_of, make_request, ring_over

__all__ = ["exchange"]
pytestmark = pytest.mark.timeout(60)


def linked_numbers(pool):
    return {int(name.rpartition("#")[2]) for name, figures in pool.stats().items() if figures["linked"]}


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_ranks_move_to_their_own_teachers_as_these_become_many(exchange):
    exchange.teacher("teacher 0")
    pools = [exchange.pool(rank, ranks=4, links=1) for rank in range(4)]
    assert until(lambda: all(linked_numbers(pool) == {0} for pool in pools))
    results, threads = {}, []

    def consume(rank):
        results[rank] = ids_of(ring_over(pools[rank], [make_request(n) for n in range(rank, 400, 4)]))

    for rank in range(4):
        threads.append(threading.Thread(target=consume, args=(rank,)))
        threads[-1].start()
    for number in range(1, 8):
        exchange.teacher(f"teacher {number}")
    assert until(lambda: all(linked_numbers(pools[rank]) == {rank, rank + 4} for rank in range(4)))
    for thread in threads:
        thread.join(30)
    assert results == {rank: list(range(rank, 400, 4)) for rank in range(4)}
    assert not [line for line in exchange.lines if "did not link" in line or "refused" in line]
