"""What a ring reports, over a pool that answers at once or after a while."""

import time

import pytest
import torch

from disaggkd_cli.transport import HiddenStateRing, Request, RequestsExhausted
from disaggkd_cli.transport.ledger import Ledger

WIDTH = 4


class Pool:
    """A pool of one teacher that answers when the test says so."""

    cuda = None

    def __init__(self, ready_at_take, wait=0.0):
        self.ready_at_take = iter(ready_at_take)
        self.wait = wait
        self.ledger = Ledger()
        self.ledger.link_up(0, "teacher 0")

    def open_ring(self, slots):
        return self.ledger.open_consumer(slots)

    def await_credit(self, consumer):
        while self.ledger.is_open(consumer) and not self.ledger.has_credit(consumer):
            time.sleep(0.001)
        return self.ledger.is_open(consumer)

    def admit(self, consumer, outgoing, needs_slot):
        self.ledger.admit(consumer, outgoing, needs_slot)

    def complete(self, consumer):
        self.ledger.complete(consumer)

    def ready(self, consumer):
        return next(self.ready_at_take)

    def take(self, consumer):
        time.sleep(self.wait)
        while not self.ledger.is_finished(consumer):
            while (outgoing := self.ledger.assign()) is not None:
                self.ledger.arriving(0, outgoing.ticket)
                self.ledger.delivered(0, outgoing.ticket)
            if (taken := self.ledger.take(consumer)) is not None:
                return taken
        raise RequestsExhausted("all")

    def release(self, outgoing):
        self.ledger.release(outgoing)

    def close_ring(self, consumer):
        self.ledger.close_consumer(consumer)

    def stats(self):
        return {}


def requests(count, rows=3):
    ids = torch.zeros(1, 8, dtype=torch.int32)
    for number in range(count):
        yield Request(number, ids, torch.tensor([8], dtype=torch.int32), torch.arange(rows, dtype=torch.int32))


def test_ring_fill_is_the_mean_share_of_slots_that_lay_ready():
    ring = HiddenStateRing(requests(3), 4, 8, WIDTH, "bfloat16", Pool([0, 4, 2, 0]))
    for lease in ring:
        lease.release()
    assert ring.stats()["ring_fill"] == pytest.approx((0 + 1 + 0.5) / 3)
    assert ring.stats() == {
        "ring_fill": 0.0, "stall_seconds": 0.0, "received_bytes": 0, "takes": 0, "teachers": {},
    }  # fmt: skip
    ring.close()


def test_the_stall_of_every_take_counts():
    ring = HiddenStateRing(requests(3), 2, 8, WIDTH, "float32", Pool([0] * 3, wait=0.02))
    stalls = []
    for _ in range(3):
        lease = ring.take()
        stalls.append(lease.stall_seconds)
        lease.release()
    figures = ring.stats()
    assert min(stalls) >= 0.02
    assert figures["stall_seconds"] == pytest.approx(sum(stalls))
    assert (figures["takes"], figures["received_bytes"]) == (3, 3 * 3 * WIDTH * 4)
    ring.close()
