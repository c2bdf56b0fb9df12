"""Stages as threads: they overlap, answers find whoever asked, a failed forward costs one answer, all end together."""

import threading
import time

import pytest
import torch

from disaggkd_cli.errors import RunError
from disaggkd_cli.replica.pipeline import Pipeline
from disaggkd_cli.replica.run_stages import serve_beside
from disaggkd_cli.replica.stage_links import Item
from disaggkd_cli.transport import Request
from disaggkd_cli.transport.slots import make_slots

pytestmark = pytest.mark.timeout(60)


def make_request(number: int) -> Request:
    ids = torch.full((1, 4), number, dtype=torch.int32)
    return Request(number, ids, torch.tensor([4], dtype=torch.int32), torch.arange(4, dtype=torch.int32))


class Wire:
    """Stands for both ends of a link: hands every item to the next stage, its states copied into a slot."""

    def __init__(self, target: Pipeline):
        self.target = target
        self.given_back = 0

    def put(self, item):
        if isinstance(item, Item) and item.states is not None:
            slot = make_slots(1, item.states.nbytes)[0]
            item = Item(item.ticket, item.request, item.states.clone(), slot)
        self.target.hear(item)

    def give_back(self, slot):
        self.given_back += 1


class Replica:
    def __init__(self, size: int, seconds: float = 0.0, fail=lambda stage, number: False):
        self.stops = [threading.Event() for _ in range(size)]
        self.inside = self.most_inside = 0
        self.guard = threading.Lock()
        self.seconds, self.fail = seconds, fail
        self.stages = [Pipeline(f"teacher 0.{k}", k, size, self.compute(k), self.stops[k]) for k in range(size)]
        wires = [Wire(self.stages[(k + 1) % size]) for k in range(size)]
        for k, stage in enumerate(self.stages):
            stage.output, stage.input = wires[k], wires[k - 1]
        self.results = {}
        self.threads = []

    def compute(self, k: int):
        def one(request, received):
            with self.guard:
                self.inside += 1
                self.most_inside = max(self.most_inside, self.inside)
            time.sleep(self.seconds)
            with self.guard:
                self.inside -= 1
            if self.fail(k, request.request_id):
                raise ValueError(f"stage {k} cannot")
            start = request.input_ids.float()[..., None] if received is None else received
            return start * 10 + k

        return one

    def start(self, k: int, serve=None):
        def run():
            try:
                self.results[k] = serve_beside(self.stages[k], serve, self.stops[k])
            except BaseException as error:
                self.results[k] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def start_all(self, serve):
        self.start(0, serve)
        for k in range(1, len(self.stages)):
            self.start(k)

    def end(self):
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def expected(number: int, size: int) -> float:
    value = float(number)
    for k in range(size):
        value = value * 10 + k
    return value


def ask_all(replica: Replica, numbers, outcomes: dict):
    def serve():
        def ask(number):
            try:
                outcomes[number] = replica.stages[0].forward(make_request(number)).reshape(-1)[0].item()
            except Exception as error:
                outcomes[number] = error

        threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return "served"

    return serve


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_answer_finds_whoever_asked_and_stages_overlap(size):
    replica, outcomes = Replica(size, seconds=0.01), {}
    replica.start_all(ask_all(replica, range(1, 31), outcomes))
    replica.end()
    assert replica.results == {0: "served", **dict.fromkeys(range(1, size))}
    assert outcomes == {number: expected(number, size) for number in range(1, 31)}
    assert 2 <= replica.most_inside <= size
    assert [stage.computed for stage in replica.stages] == [30] * size
    assert replica.stages[0].input.given_back == 30


def test_no_more_than_so_many_are_inside():
    replica, outcomes = Replica(2, seconds=0.02), {}
    most = []
    replica.start_all(ask_all(replica, range(1, 21), outcomes))
    while not replica.results:
        most.append(len(replica.stages[0]._open))
        time.sleep(0.001)
    replica.end()
    assert max(most) == replica.stages[0].most == 4


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failed_forward_costs_one_answer(bad):
    replica, outcomes = Replica(3, fail=lambda stage, number: stage == bad and number == 5), {}
    replica.start_all(ask_all(replica, range(1, 11), outcomes))
    replica.end()
    assert str(outcomes.pop(5)) == f"teacher 0.{bad}: ValueError: stage {bad} cannot"
    assert outcomes == {number: expected(number, 3) for number in range(1, 11) if number != 5}
    assert replica.results[0] == "served"


@pytest.mark.parametrize("told", [0, 1, 2])
def test_one_that_is_told_to_stop_stops_all_after_their_answers(told):
    replica = Replica(3)

    def serve():
        assert replica.stages[0].forward(make_request(4)).reshape(-1)[0].item() == expected(4, 3)
        replica.stops[told].set()
        assert replica.stops[0].wait(20)
        return "told to stop"

    replica.start_all(serve)
    replica.end()
    assert replica.results == {0: "told to stop", 1: None, 2: None}


def test_a_lost_stage_ends_those_that_wait():
    replica = Replica(2)

    def serve():
        replica.stages[0].forward(make_request(4))

    replica.start(0, serve)  # its second stage never starts
    time.sleep(0.1)
    assert replica.stages[0].fail(RunError("teacher 0.1 is gone"))
    assert not replica.stages[0].fail(RunError("said twice"))
    replica.end()
    assert isinstance(replica.results[0], RunError)
    assert "teacher 0.1 is gone" in str(replica.results[0])
    assert replica.stops[0].is_set()


def test_what_serving_raises_is_raised_once_all_have_ended():
    replica = Replica(2)

    def serve():
        raise RunError("no student")

    replica.start_all(serve)
    replica.end()
    assert str(replica.results[0]) == "no student" and replica.results[1] is None
