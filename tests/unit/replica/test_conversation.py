"""Two ranks of a replica talk over a real link on loopback."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from disaggkd_cli.replica.conversation import Conversation
from disaggkd_cli.transport import Request, open_store
from disaggkd_cli.transport.link import STUDENT, TEACHER, form_link
from disaggkd_cli.transport.protocol import Header, Kind, StopReason, decode_request, request_body, request_header

pytestmark = pytest.mark.timeout(60)
LAST_WORD = Header(Kind.STOP, flags=StopReason.LINK_CLOSED)


class Pair:
    """A leader's and another rank's side, with what each has heard and lost."""

    def __init__(self, timeout: float):
        store = open_store("127.0.0.1:0", host_it=True)

        def form(side: int):
            return form_link(store.clone(), "replica", side, name=f"link of side {side}", generation=3, timeout=timeout)

        with ThreadPoolExecutor(2) as pool:
            self.links = list(pool.map(form, (STUDENT, TEACHER)))
        self.heard = [queue.SimpleQueue(), queue.SimpleQueue()]
        self.lost = [queue.SimpleQueue(), queue.SimpleQueue()]
        self.sides = [
            Conversation(link, lambda header, body, heard=heard: heard.put((header, body)), lost.put)
            for link, heard, lost in zip(self.links, self.heard, self.lost, strict=True)
        ]
        for side in self.sides:
            side.start()


def test_requests_travel_whole_and_in_order():
    pair = Pair(timeout=20)
    leader, other = pair.sides
    requests = [
        Request(number, torch.full((2, 9), number, dtype=torch.int32), torch.tensor([9, 4, 5], dtype=torch.int32),
                torch.arange(number, dtype=torch.int32))
        for number in range(12)
    ]  # fmt: skip
    for number, request in enumerate(requests):
        body = request_body(request)
        leader.say(request_header(request, body, number), body)
        other.say(Header(Kind.READY, ticket=number))
    for number, request in enumerate(requests):
        header, body = pair.heard[1].get(timeout=20)
        received = decode_request(header, body)
        assert header.ticket == received.request_id == number
        assert torch.equal(received.input_ids, request.input_ids)
        assert torch.equal(received.rows, request.rows)
        header, body = pair.heard[0].get(timeout=20)
        assert (header.kind, header.ticket, body) == (Kind.READY, number, None)
    end(pair)


def end(pair) -> None:
    """Both say their last word and close, at the same time as two processes would; nobody counts that as a loss."""
    for side in pair.sides:
        side.say(LAST_WORD)
    closing = [threading.Thread(target=side.close) for side in pair.sides]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)
        assert not thread.is_alive()
    assert [lost.empty() for lost in pair.lost] == [True, True]


def test_silence_is_not_a_loss():
    pair = Pair(timeout=1)
    time.sleep(3)
    assert [lost.empty() for lost in pair.lost] == [True, True]
    assert [heard.empty() for heard in pair.heard] == [True, True]
    end(pair)


def test_a_peer_that_says_nothing_at_all_is_lost_within_the_timeout():
    pair = Pair(timeout=1)
    pair.sides[1]._outbox.put(None)  # its thread ends: no signs of life any more
    error = pair.lost[0].get(timeout=20)
    assert "link of side 0: could not" in str(error)
