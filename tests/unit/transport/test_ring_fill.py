"""The ring's own figures."""

import threading

import pytest

from .test_exchange import exchange, hidden_of, make_request, ring_over, wait_until  # noqa: F401

pytestmark = pytest.mark.timeout(60)


def test_the_fill_counts_slots_that_are_ready_and_no_others(exchange):  # noqa: F811
    gate = threading.Event()

    def forward(request):
        assert gate.wait(30)
        return hidden_of(request)

    exchange.teacher(forward=forward)
    pool = exchange.pool()
    asked = threading.Event()

    def requests():
        yield from (make_request(number) for number in range(3))
        asked.set()

    ring = ring_over(pool, requests(), depth=4)
    assert asked.wait(30)
    opening = threading.Timer(0.2, gate.set)
    opening.start()
    ring.take().release()  # which came to an empty ring, and waited
    wait_until(lambda: pool.ready(ring._consumer) == 2)
    ring.take().release()
    figures = ring.stats()
    assert figures["ring_fill"] == (0 / 4 + 2 / 4) / 2
    assert figures["takes"] == 2 and figures["stall_seconds"] > 0.1
    ring.take().release()
    assert ring.stats()["ring_fill"] == 1 / 4, "the figures start anew"
