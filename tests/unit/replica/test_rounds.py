"""Ranks of a replica as threads: a forward is everybody's, none is without need, and all end together."""

import queue
import random
import threading
import time

import pytest
import torch

from disaggkd_cli.errors import RunError
from disaggkd_cli.replica.ending import ReplicaBroken
from disaggkd_cli.replica.rounds import Rounds
from disaggkd_cli.replica.run import IDLE, take_part
from disaggkd_cli.transport import Request
from disaggkd_cli.transport.errors import LinkLost, ProtocolError
from disaggkd_cli.transport.protocol import Header, Kind

pytestmark = pytest.mark.timeout(60)
VOCABULARY = 100_000


def make_request(number: int) -> Request:
    ids = torch.full((1, 4), number, dtype=torch.int32)
    return Request(number, ids, torch.tensor([4], dtype=torch.int32), torch.arange(4, dtype=torch.int32))


class Replica:
    """Ranks whose messages travel through queues, in order, and whose forward waits for all ranks as collectives do."""

    def __init__(self, size: int, *, shared: bool = False, leave_seconds: float = 20.0):
        self.size, self.shared = size, shared
        self.barrier = threading.Barrier(size)
        self.stops = [threading.Event() for _ in range(size)]
        self.computed = [[] for _ in range(size)]
        self.results = {}
        self.threads = []
        wires = {}
        for rank in range(size):
            for peer in range(1, size) if rank == 0 else [0]:
                wires[rank, peer] = queue.SimpleQueue()
        self.rounds = [
            Rounds(
                f"teacher 0.{rank}",
                rank,
                {peer: self.say_into(wire) for (source, peer), wire in wires.items() if source == rank},
                {peer: f"teacher 0.{peer}" for source, peer in wires if source == rank},
                shared=shared,
                leave_seconds=leave_seconds,
                on_leave=self.stops[rank].set,
            )
            for rank in range(size)
        ]
        for (source, peer), wire in wires.items():
            threading.Thread(target=self.deliver, args=(source, self.rounds[peer], wire), daemon=True).start()

    @staticmethod
    def say_into(wire):
        return lambda header, body: wire.put((header, body))

    @staticmethod
    def deliver(source, rounds, wire):
        while True:
            header, body = wire.get()
            rounds.hear(source, header, body)

    def forward(self, rank: int):
        def compute(request):
            self.barrier.wait(20)
            self.computed[rank].append(request.request_id)
            return torch.full((4, 2), float(request.input_ids[0, 0]))

        return compute

    def start(self, rank: int, serve, forward=None):
        def run():
            try:
                self.results[rank] = take_part(
                    self.rounds[rank], forward or self.forward(rank), VOCABULARY, serve, self.stops[rank]
                )
            except Exception as error:
                self.results[rank] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self):
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def serving(rank: int, requests, seconds, stop: threading.Event | None = None):
    """Return a server that answers `requests`, pausing before each, and then waits to be told to stop."""

    def serve(compute):
        for number, pause in zip(requests, seconds, strict=True):
            time.sleep(pause)
            assert torch.equal(compute(make_request(number)), torch.full((4, 2), float(number)))
        if stop is not None:
            assert stop.wait(20)
        return f"served {rank}"

    return serve


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_rank_answers_its_own_and_no_round_is_without_work(size, seed):
    generator = random.Random(seed)
    replica = Replica(size)
    for rank in range(size):
        count = generator.randrange(1, 30)
        pauses = [generator.choice([0, 0, 0.001, 0.004]) for _ in range(count)]
        replica.start(rank, serving(rank, range(100 * rank + 1, 100 * rank + 1 + count), pauses))
    replica.end()
    assert replica.results == {rank: f"served {rank}" for rank in range(size)}
    rounds = list(zip(*replica.computed, strict=True))  # strict: all ranks ran the same number of them
    assert all(any(request != IDLE.request_id for request in together) for together in rounds)
    for rank in range(size):
        mine = [request for request in replica.computed[rank] if request != IDLE.request_id]
        assert mine == list(range(100 * rank + 1, 100 * rank + 1 + len(mine)))
        assert replica.rounds[rank].idle_rounds == len(rounds) - len(mine)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_busy_rank_is_not_kept_waiting_by_idle_ones(busy):
    replica = Replica(3)
    for rank in range(3):
        requests = range(1, 51) if rank == busy else []
        replica.start(rank, serving(rank, requests, [0] * len(requests), replica.stops[rank]))
    wait_until(lambda: len(replica.computed[busy]) == 50)
    assert [rounds.begun for rounds in replica.rounds] == [50] * 3
    replica.stops[2].set()
    replica.end()
    assert set(replica.computed[(busy + 1) % 3]) == {IDLE.request_id}


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_shared_rounds_compute_the_leaders_request_everywhere():
    replica = Replica(3, shared=True)
    replica.start(0, serving(0, range(1, 21), [0] * 20))
    for rank in (1, 2):
        replica.start(rank, lambda _, rank=rank: replica.stops[rank].wait(20))
    replica.end()
    assert replica.computed == [list(range(1, 21))] * 3
    assert [rounds.idle_rounds for rounds in replica.rounds] == [0, 0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_nobody_computes_without_work_and_one_that_stops_takes_the_others_along(first):
    replica = Replica(2)
    for rank in range(2):
        replica.start(rank, serving(rank, [], [], replica.stops[rank]))
    replica.stops[first].set()
    replica.end()
    assert replica.results == {0: "served 0", 1: "served 1"}
    assert replica.computed == [[], []]


def test_a_rank_that_still_answers_is_waited_for():
    replica = Replica(2)
    replica.start(0, serving(0, [], []))
    replica.start(1, serving(1, range(1, 11), [0.01] * 10))
    replica.end()
    assert replica.computed == [[IDLE.request_id] * 10, list(range(1, 11))]


def test_a_rank_that_does_not_stop_is_named():
    replica = Replica(2, leave_seconds=0.2)
    replica.start(0, serving(0, [], []))
    replica.start(1, lambda _: time.sleep(4))
    replica.threads[0].join(20)
    assert "teacher 0.1 did not stop serving within 0.2 s" in str(replica.results[0])


def test_a_forward_that_fails_ends_its_rank_and_a_lost_rank_the_others():
    replica = Replica(2)
    raised = []

    def serve(compute):
        try:
            compute(make_request(1))
        except ReplicaBroken as error:
            raised.append(str(error))
            raise

    def forward(request):
        raise torch.OutOfMemoryError("no memory")

    replica.start(0, serve, forward)
    replica.threads[0].join(20)
    assert "teacher 0.0: the forward of round 1 failed: OutOfMemoryError: no memory" in str(replica.results[0])
    assert raised == [str(replica.results[0])]
    assert replica.rounds[1].fail(LinkLost("link teacher 0.1 - teacher 0.0: the peer is gone"))
    assert not replica.rounds[1].fail(LinkLost("again"))
    with pytest.raises(RunError, match="the peer is gone"):
        replica.rounds[1].next()


def test_token_ids_that_the_model_lacks_are_refused_before_a_round():
    replica = Replica(2)

    def serve(compute):
        with pytest.raises(ValueError, match="request 7 has token ids outside of 0 … 99999"):
            request = make_request(7)
            request.input_ids[0, 2] = VOCABULARY
            compute(request)
        return "refused"

    replica.start(0, serve)
    replica.start(1, serving(1, [], []))
    replica.end()
    assert replica.results[0] == "refused"
    assert replica.computed == [[], []]


def test_messages_that_make_no_sense_are_refused():
    _, rounds = Replica(2).rounds
    with pytest.raises(ProtocolError, match="round 3 announced after round 0"):
        rounds.hear(0, Header(Kind.REQUEST, ticket=3), None)
    with pytest.raises(ProtocolError, match="HELLO from teacher 0.0"):
        rounds.hear(0, Header(Kind.HELLO), None)
