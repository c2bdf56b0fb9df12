"""What the links of one rank share: connections to the store while they form, and a teacher's send buffers."""

import pytest
import torch

from disaggkd_cli.transport.connections import StoreConnections
from disaggkd_cli.transport.send_buffers import SendBuffers


class Store:
    """Counts the connections opened to it."""

    def __init__(self):
        self.opened = 0
        self.broken = False

    def clone(self):
        if self.broken:
            raise RuntimeError("no answer")
        self.opened += 1
        return f"connection {self.opened}"


def test_a_connection_given_back_is_lent_again():
    store = Store()
    connections = StoreConnections(store, most=2)
    first = connections.borrow()
    connections.give_back(first)
    assert connections.borrow() == first
    assert connections.borrow() == "connection 2"
    assert connections.borrow() is None
    connections.lose()
    assert connections.borrow() == "connection 3"


def test_a_store_that_does_not_answer_costs_no_place():
    store = Store()
    connections = StoreConnections(store, most=1)
    store.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no answer"):
            connections.borrow()
    store.broken = False
    assert connections.borrow() == "connection 1"


def test_buffers_are_used_again_and_the_smallest_that_is_large_enough():
    buffers = SendBuffers(torch.device("cpu"))
    small, large = buffers.take(10), buffers.take(100)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(8) is small
    assert buffers.take(8) is large
    fresh = buffers.take(8)
    assert fresh is not small and fresh is not large


def test_a_buffer_that_has_become_too_small_makes_room():
    buffers = SendBuffers(torch.device("cpu"))
    buffers.give_back(buffers.take(10))
    assert buffers.take(20).numel() == 20
    assert buffers.take(1).numel() == 1, "the small one is gone: memory is that of the replies on their way"
